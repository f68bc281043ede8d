"""The table that Python and C++ share: the rules of the fused step, their columns of coefficients, passes and dtypes.

CMake runs this file to write `table.h`, which the C++ kernels are compiled with. So the order of a rule or of a column
is stated here only. The header also holds a hash of the C++ sources. At import, backends.py compares the table and the
hash with those of the compiled module, and does not use a module that was built from others.

This file imports nothing of trimtab: CMake runs it before trimtab is installed.
"""

import hashlib
import sys
from pathlib import Path

# The states that each rule keeps, in order: v is a second moment, not negative; m is a first moment of the gradient and
# n one of the normalized gradient, both signed.
RULES = {
    "adamw": "mv",
    "momentum": "m",
    "lion": "m",
    "rms": "v",
    "ademamix": "mmv",
    "rms_momentum": "nv",
    "rms_centered": "mv",
    "rms_centered_momentum": "nmv",
}
SCALARS = (
    "grad_scale",  # g <- grad_scale * gradient
    "coupled",  # g <- g + coupled * p          (weight decay through the gradient)
    "decay",  # p <- decay * p                (decoupled weight decay)
    "lr",  # p <- p - lr * update
    "beta1",  # m <- beta1 * m + gain1 * g
    "gain1",
    "beta2",  # v <- beta2 * v + gain2 * g^2
    "gain2",
    "beta3",  # slow <- beta3 * slow + gain3 * g
    "gain3",
    "debias",  # multiplies sqrt(v)
    "eps",
    "mix_m",  # weights of m and of g (or of the slow average) in the update
    "mix_g",
    "step",  # the number of this step, which determines the dither of the quadratic code
)
PASSES = ("update", "norms", "ratios")  # write the tensors, or compute the sums that two-pass optimizers need first
DTYPES = ("float32", "bfloat16", "float16")


def describe() -> str:
    """The whole table on one line."""
    rules = [f"{name}:{states}" for name, states in RULES.items()]
    return " | ".join(" ".join(names) for names in (rules, SCALARS, PASSES, DTYPES))


def hash_sources(folder: Path = Path(__file__).parent.parent) -> str | None:
    """SHA-256 of the C++ sources of trimtab/ops, or None where there are none: wheels do not contain them."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".cpp", ".h"))
    content = hashlib.sha256()
    for path in paths:
        content.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return content.hexdigest() if paths else None


def header() -> str:
    """The table in C++."""
    states = ", ".join(f'"{states}"' for states in RULES.values())
    return f"""// Written by trimtab/ops/native/table.py. Do not edit.
#pragma once
#define TRIMTAB_RULES(X) {" ".join(f"X({name})" for name in RULES)}

namespace trimtab {{
enum class Dtype : int {{ {", ".join(DTYPES)} }};
enum class Pass : int {{ {", ".join(PASSES)} }};
enum class Rule : int {{ {", ".join(RULES)} }};
constexpr const char* STATES[] = {{ {states} }};  // by rule; m is signed, v is not negative
constexpr int max_states = {max(map(len, RULES.values()))};
struct Scalars {{ float {", ".join(SCALARS)}; }};
constexpr const char* TABLE = "{describe()}";
constexpr const char* SOURCES = "{hash_sources()}";
}}  // namespace trimtab
"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(header())
