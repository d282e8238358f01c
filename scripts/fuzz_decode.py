"""Random calls of flash_attn_with_kvcache against the float64 reference: more than the tests take.

    python scripts/fuzz_decode.py [--calls 10000 --backend sm80 --seed 0]

Problems are those of tests/kvcache_problems.py. A failure is shrunk and printed as the problem to
write out in a test. Needs what the tests need.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import neginf
from kvcache_problems import CacheInputs, cache_problems
from targets import DTYPES, max_head_dim

HEAD_DIMS = (1, 8, 40, 59, 64, 96, 128, 192, 256)


def fuzz(backend, calls, first_seed):
    device = "cpu" if backend == "cpu" else "cuda"
    largest = {name: max_head_dim("decode", backend, name) for name in DTYPES}
    dtypes = [name for name, size in largest.items() if size]
    head_dims = [d for d in HEAD_DIMS if d <= min(largest[name] for name in dtypes)]
    start, ran = time.monotonic(), 0

    @seed(first_seed)
    @settings(
        max_examples=calls, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(problem=cache_problems(head_dims), dtype=st.sampled_from(dtypes))
    def call(problem, dtype):
        nonlocal ran
        CacheInputs(problem, DTYPES[dtype], device).check()
        ran += 1
        if ran % 1000 == 0:
            print(f"{ran} calls, {time.monotonic() - start:.0f} s", flush=True)

    try:
        with neginf.backend(backend):
            call()
    finally:
        print(f"{ran} calls on {backend} agreed with the reference, seed {first_seed}")


def main():
    ready = [
        name for name, one in neginf.backends().items() if one.usable and "decode" in one.operations
    ]
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--calls", type=int, default=10_000)
    options.add_argument("--backend", choices=ready, default=ready[-1])
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    fuzz(chosen.backend, chosen.calls, chosen.seed)


if __name__ == "__main__":
    main()
