"""The C++ headers alone: unit tests, what must not compile, and what csrc may not contain."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CPP = Path(__file__).resolve().parent / "cpp"
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"})
CONTRACT_HEADERS = {CSRC / "lse.h", CSRC / "lse_backward.h"}

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", f"-I{CPP}"]

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no host C++ compiler")


def compile_and_run(source, program):
    sanitize = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
    command = [COMPILER, "-O1", *FLAGS, *sanitize, str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_compiler
@pytest.mark.parametrize("name", ["lse", "mask", "sequence", "swizzle", "tile_order", "tiles"])
def test_unit(name, tmp_path):
    compile_and_run(CPP / f"{name}_test.cpp", tmp_path / name)


@needs_compiler
def test_a_failing_check_fails(tmp_path):
    source = tmp_path / "failing.cpp"
    source.write_text('#include "check.h"\nint main() { CHECK(1 == 2); return report(); }\n')
    with pytest.raises(AssertionError, match="1 == 2"):
        compile_and_run(source, tmp_path / "failing")


# Each pair differs in nothing but the offence, so the bad one fails for the right reason.
PAIRS = {
    "lse_default": ("Lse l = Lse::empty();", "Lse l;"),
    "lse_from_float": ("float l(x);", "Lse l(x);"),
    "lse_from_float_braces": ("float l{x};", "Lse l{x};"),
    "lse_from_float_implicit": ("Lse l = lse;", "Lse l = x;"),
    "lse_from_float_cast": (
        "static_cast<Lse>(lse);",
        "static_cast<Lse>(x);",
    ),
    "lse_assign_float": ("Lse l = lse; l = lse;", "Lse l = lse; l = x;"),
    "lse_store_float": ("lses[0] = lse;", "lses[0] = x;"),
    "lse_to_float_implicit": ("float y = lse.value();", "float y = lse;"),
    "lse_to_float_cast": (
        "static_cast<float>(lse.value());",
        "static_cast<float>(lse);",
    ),
    "lse_arithmetic": ("(lse.value() + x);", "(lse + x);"),
    "lse_read_field": ("lse.value();", "lse.value_;"),
    "lse_write_value": ("float y; y = lse.value();", "lse.value() = x;"),
    "lse_of_other_real": (
        "BasicLse<double> l = BasicLse<double>::empty();",
        "BasicLse<double> l = lse;",
    ),
    "lse_pointer_from_float_pointer": ("Lse* p = lses;", "Lse* p = floats;"),
    "lse_pointer_static_cast": (
        "static_cast<Lse*>(lses);",
        "static_cast<Lse*>(floats);",
    ),
    "float_pointer_from_lse_pointer": ("float* p = floats;", "float* p = lses;"),
    "merge_floats": (
        "merge<float>(1, [&](int) { return lse; });",
        "merge<float>(1, [&](int) { return x; });",
    ),
    "merge_divisors": (
        "merge<float>(1, [&](int) { return lse; });",
        "merge<float>(1, [&](int) { return divisor; });",
    ),
    "finalized_by_hand": ("Finalized<float>{lse, x, true};", "Finalized<float>{x, x};"),
    "divisor_default": (
        "Divisor d = Divisor::out_of_bounds();",
        "Divisor d;",
    ),
    "divisor_from_float": ("Divisor d(divisor);", "Divisor d(x);"),
    "divisor_from_float_braces": ("Divisor d{divisor};", "Divisor d{x};"),
    "divisor_from_float_implicit": ("Divisor d = divisor;", "Divisor d = x;"),
    "divisor_of_float": ("Divisor::of(lse);", "Divisor::of(x);"),
    "divisor_from_lse": ("Divisor d = Divisor::of(lse);", "Divisor d = lse;"),
    "divisor_from_lse_explicit": ("Divisor::of(lse);", "Divisor{lse};"),
    "divisor_of_divisor": ("Divisor::of(lse);", "Divisor::of(divisor);"),
    "lse_from_divisor": ("Lse l = lse;", "Lse l = divisor;"),
    "lse_from_divisor_explicit": ("Lse{lse};", "Lse{divisor};"),
    "weight_of_divisor": (
        "Merged<float>{lse, x, x}.weight_of(lse);",
        "Merged<float>{lse, x, x}.weight_of(divisor);",
    ),
    "weight_of_float": (
        "Merged<float>{lse, x, x}.weight_of(lse);",
        "Merged<float>{lse, x, x}.weight_of(x);",
    ),
    "log2_divisor_of_float": ("Log2Divisor{divisor};", "Log2Divisor{x};"),
    "log2_divisor_of_lse": ("Log2Divisor{divisor};", "Log2Divisor{lse};"),
    "log2_divisor_implicit": ("Log2Divisor d{divisor};", "Log2Divisor d = divisor;"),
    "log2_divisor_to_float": (
        "Log2Divisor{divisor}.exponent(x, x);",
        "float y = Log2Divisor{divisor};",
    ),
    "log2_divisor_to_divisor": ("Divisor d{divisor};", "Divisor d{Log2Divisor{divisor}};"),
    "divisor_read_value": ("lse.value();", "divisor.value();"),
    "divisor_read_field": ("divisor.probability(x);", "divisor.value_;"),
    "divisor_to_float": ("divisor.probability(x);", "float y = divisor;"),
    "divisor_to_float_cast": (
        "static_cast<float>(divisor.probability(x));",
        "static_cast<float>(divisor);",
    ),
    "divisor_arithmetic": ("(x - lse.value());", "(x - divisor);"),
    "lse_pointer_from_divisor_pointer": ("Lse* p = lses;", "Lse* p = divisors;"),
    "divisor_pointer_from_lse_pointer": (
        "Divisor* p = divisors;",
        "Divisor* p = lses;",
    ),
    "divisor_pointer_from_float_pointer": (
        "Divisor* p = divisors;",
        "Divisor* p = floats;",
    ),
    "float_pointer_from_divisor_pointer": (
        "float* p = floats;",
        "float* p = divisors;",
    ),
    "lse_store_divisor": ("lses[0] = lse;", "lses[0] = divisor;"),
    "divisor_store_lse": ("divisors[0] = Divisor::of(lse);", "divisors[0] = lse;"),
    "forward_params_take_lse": (
        "ForwardParams<float> p{}; p.lse = lses;",
        "ForwardParams<float> p{}; p.lse = floats;",
    ),
    "backward_params_take_lse": (
        "BackwardParams<float> p{}; p.lse = lses;",
        "BackwardParams<float> p{}; p.lse = divisors;",
    ),
    "backward_params_do_not_modify_lse": (
        "BackwardParams<float> p{}; p.lse = lses; p.lse[0].value();",
        "BackwardParams<float> p{}; p.lse = lses; p.lse[0] = lse;",
    ),
    "combine_params_take_lse": (
        "CombineParams<float> p{}; p.stacked.lse = lses;",
        "CombineParams<float> p{}; p.stacked.lse = floats;",
    ),
}

PREAMBLE = """
#include "lse_backward.h"
#include "params.h"
using namespace neginf;
"""
FUNCTION = """
void NAME(float x, Lse lse, Divisor divisor, float* floats, Lse* lses, Divisor* divisors) {
  BODY
}
"""


def check_syntax(source, text, *flags):
    source.write_text(text)
    command = [COMPILER, "-fsyntax-only", *FLAGS, *flags, str(source)]
    return subprocess.run(command, capture_output=True, text=True)


def check_snippets(source, snippets):
    functions = [FUNCTION.replace("NAME", n).replace("BODY", b) for n, b in snippets.items()]
    unused = ["-Wno-unused", "-Wno-unused-parameter"]
    return check_syntax(source, PREAMBLE + "".join(functions), *unused)


@needs_compiler
def test_proper_use_compiles(tmp_path):
    result = check_snippets(
        tmp_path / "good.cpp", {name: good for name, (good, _) in PAIRS.items()}
    )
    assert result.returncode == 0, result.stderr


@needs_compiler
@pytest.mark.parametrize("name", PAIRS)
def test_misuse_does_not_compile(name, tmp_path):
    bad = PAIRS[name][1]
    result = check_snippets(tmp_path / "bad.cpp", {name: bad})
    assert result.returncode != 0, f"compiles and must not: {bad}"
    line_of_body = (PREAMBLE + FUNCTION).count("\n", 0, (PREAMBLE + FUNCTION).index("BODY")) + 1
    assert f"bad.cpp:{line_of_body}:" in result.stderr, result.stderr
    assert "redeclaration" not in result.stderr
    assert "shadows" not in result.stderr


@needs_compiler
@pytest.mark.parametrize(
    "name", ["lse.h", "lse_backward.h", "mask.h", "params.h", "common/sequence.h", "sm80/swizzle.h"]
)
def test_header_stands_alone(name, tmp_path):
    text = f'#include "{name}"\n#include "{name}"\n'
    result = check_syntax(tmp_path / "alone.cpp", text)
    assert result.returncode == 0, result.stderr


@needs_compiler
def test_forward_cannot_name_a_divisor(tmp_path):
    text = '#include "params.h"\nneginf::Divisor* divisor;\n'
    result = check_syntax(tmp_path / "forward.cpp", text)
    assert result.returncode != 0
    assert "Divisor" in result.stderr


# An infinity or a finite stand-in for one, written or asked for. A plain upper limit is neither.
INFINITY = re.compile(
    r"""
      \binfinity\s*\(            | \bINFINITY\b          | \bHUGE_VAL[FL]?\b
    | \b(?:is|is_)(?:neg|pos)?_?(?:inf|infinite|finite)\s*\(
    | -\s*(?:FLT|DBL|LDBL)_MAX\b | \bCUDART_(?:INF|MAX_NORMAL)\w*
    | -\s*(?:std::)?numeric_limits\s*<[^>]*>\s*::\s*max\s*\( | ::\s*lowest\s*\(
    | \b0x[7f]f[8f]0*u?\b        | __int_as_float         | __longlong_as_double
    | -\s*\d+(?:\.\d*)?[eE]\+?\d+                         # -1e30, -5e4
    | \b\d+(?:\.\d*)?[eE]\+?[1-9]\d                       # 1e30
    | \blog2?f?\s*\(\s*(?:0|eps)
    """,
    re.VERBOSE | re.IGNORECASE,
)
LSE_CAST = re.compile(
    r"_cast\s*<[^;(]*\b(?:Basic)?(?:Lse|(?:Log2)?Divisor)\b|\(\s*(?:Basic)?Lse\b[^()]*\*\s*\)"
)
COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


def code_of(path):
    """The file with comments and string literals blanked, line breaks kept."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())  # noqa: E731
    return COMMENT_OR_STRING.sub(blank, path.read_text())


def findings(pattern, paths):
    found = []
    for path in paths:
        code = code_of(path)
        for match in pattern.finditer(code):
            line = code.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {match.group().strip()}")
    return found


def includes(path):
    return re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "offence",
    [
        "x = -std::numeric_limits<float>::infinity();",
        "x = -INFINITY;",
        "x = HUGE_VALF;",
        "if (std::isinf(x)) {}",
        "if (isfinite(x)) {}",
        "t.isneginf();",
        "x = -FLT_MAX;",
        "x = -std::numeric_limits<Real>::max();",
        "x = std::numeric_limits<Real>::lowest();",
        "x = -1e30f;",
        "x = -5e4;",
        "x = 1.0e30;",
        "x = 0xff800000;",
        "x = 0x7f800000u;",
        "x = CUDART_INF_F;",
        "x = std::log(0.0f);",
    ],
)
def test_infinity_pattern_finds(offence):
    assert INFINITY.search(offence)


@pytest.mark.parametrize(
    "innocent",
    [
        "constexpr int kAny = std::numeric_limits<int>::max();",
        "good = scale <= std::numeric_limits<float>::max();",
        "constexpr float kLog2e = 1.4426950408889634f;",
        "x = 1e-6f - 1e-3;",
        "namespace neginf {",
        "x = log(row_sum);",
        "is_masked(score)",
    ],
)
def test_infinity_pattern_leaves(innocent):
    assert not INFINITY.search(innocent)


def test_comments_and_strings_are_not_code(tmp_path):
    source = tmp_path / "a.h"
    source.write_text('// INFINITY\n/* -1e30\n */ x = "isinf("; INFINITY;\n')
    assert len(INFINITY.findall(code_of(source))) == 1
    assert code_of(source).count("\n") == 3


def test_sources_are_found():
    assert set(SOURCES) > CONTRACT_HEADERS
    assert len(findings(INFINITY, CONTRACT_HEADERS)) >= 4


def test_no_infinity_outside_the_contract_headers():
    others = [path for path in SOURCES if path not in CONTRACT_HEADERS]
    assert findings(INFINITY, others) == []


def test_numbers_become_lse_in_one_place():
    for cast in [
        "reinterpret_cast<BasicLse<Real>*>(p)",
        "static_cast<const Lse*>(p)",
        "reinterpret_cast<Divisor*>(p)",
        "static_cast<Log2Divisor*>(p)",
        "(Lse*)p",
    ]:
        assert LSE_CAST.search(cast)
    found = findings(LSE_CAST, SOURCES)
    assert len(found) == 1, found
    assert found[0].startswith("csrc/torch/")


def forward_files():
    """Every file that is reachable from a forward or combine source."""
    roots = [p for p in SOURCES if "forward" in p.name or re.match(r"combine\.(cpp|cu)", p.name)]
    reached = set()
    while roots:
        path = roots.pop()
        if path in reached:
            continue
        reached.add(path)
        for name in includes(path):
            near = [path.parent / name, CSRC / name]
            roots += [p.resolve() for p in near if p.resolve() in SOURCES]
    return reached


def test_no_forward_file_reaches_the_divisor():
    files = forward_files()
    assert CSRC / "lse.h" in files
    assert CSRC / "lse_backward.h" not in files


def test_contract_headers_need_only_the_standard_library():
    allowed = {"cmath", "limits", "lse.h"}
    for path in CONTRACT_HEADERS:
        assert set(includes(path)) <= allowed


def test_kernels_see_no_torch():
    for path in SOURCES:
        if path.suffix in {".cu", ".cuh"} or path.parent == CSRC or path.parent.name == "common":
            offending = [n for n in includes(path) if re.match(r"(torch|ATen|c10)/", n)]
            assert offending == [], path
