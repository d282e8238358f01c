"""Runs probes of one library in this process: python -m neginf.audit.worker SPEC RESULTS PROBE...

Each result is one line of JSON in the file RESULTS, written at once, so that a crash costs one
probe: whoever started this sees which one is missing.
"""

import json
import sys
import warnings

import torch

from neginf.audit import probes
from neginf.audit.runner import BROKEN_DEVICE
from neginf.audit.specs import load


def main(spec, results, names):
    warnings.simplefilter("ignore")
    adapter = load(spec)()
    for name in names:
        finding = probes.run(name, adapter)
        with open(results, "a") as file:
            file.write(json.dumps({"probe": name, **finding._asdict()}) + "\n")
        if adapter.device == "cuda" and not _device_works():
            sys.exit(BROKEN_DEVICE)


def _device_works():
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
