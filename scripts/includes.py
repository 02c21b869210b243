"""Fails where a native file uses a name of the standard library without its header.

It, or a header of ours that it includes, must name it: several files are compiled as one unit, where the
includes of one do for the next.
"""

import re
import sys
from pathlib import Path

HEADERS = {
    "algorithm": r"(min|max|clamp|sort|stable_sort|find|find_if|any_of|all_of|none_of|copy|copy_n|fill|"
    r"fill_n|reverse|count|count_if|lower_bound|upper_bound|equal|transform|max_element|min_element|shuffle|"
    r"ranges::\w+)\s*[(<]",
    "array": r"array\b",
    "atomic": r"(atomic|memory_order)\w*",
    "bit": r"(bit_cast|endian|countr_zero|countl_zero|has_single_bit|bit_ceil)\b",
    "chrono": r"chrono\b",
    "condition_variable": r"condition_variable",
    "cstdint": r"u?int(8|16|32|64|ptr)_t\b",
    "cstring": r"(mem(cpy|move|set|cmp|chr)|str(len|cmp|ncmp|chr|error))\b",
    "deque": r"deque\b",
    "functional": r"(function|hash|less|greater)\s*<",
    "list": r"list\b",
    "map": r"(multi)?map\b",
    "memory": r"(unique_ptr|shared_ptr|weak_ptr|make_unique|make_shared|enable_shared_from_this)\b",
    "mutex": r"(recursive_)?(mutex|lock_guard|unique_lock|scoped_lock|once_flag|call_once)\b",
    "numeric": r"(accumulate|iota|gcd)\s*\(",
    "optional": r"(optional|nullopt)\b",
    "random": r"(mt19937\w*|uniform_\w+_distribution|random_device)\b",
    "set": r"(multi)?set\b",
    "shared_mutex": r"shared_(mutex|lock)\b",
    "span": r"(span|as_bytes|as_writable_bytes)\b",
    "string": r"(string|to_string|stoi|stoul)\b",
    "thread": r"(j?thread|this_thread)\b",
    "unordered_map": r"unordered_map\b",
    "unordered_set": r"unordered_set\b",
    "variant": r"(variant|visit|get_if|holds_alternative)\b",
    "vector": r"vector\b",
}
"""Header, and the names behind `std::` that want it."""
USES = {header: re.compile(rf"\bstd::{names}") for header, names in HEADERS.items()}


class Files:
    """The native files below a folder, by the names that includes call them by."""

    def __init__(self, root: Path) -> None:
        found = (p for p in root.rglob("*") if p.suffix in (".cpp", ".hpp", ".inl"))
        self.texts = {str(p.relative_to(root)): p.read_text() for p in sorted(found)}
        self._reached: dict[str, set[str]] = {}

    def reached(self, name: str) -> set[str]:
        """The standard headers that a file names, itself or by headers of ours."""
        if name not in self._reached:
            self._reached[name] = set()  # of one that includes itself
            text = self.texts.get(name, "")
            own = re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
            standard = set(re.findall(r"^#include <(\w+)>", text, re.MULTILINE))
            self._reached[name] = standard.union(*map(self.reached, own))
        return self._reached[name]

    def missing(self, name: str) -> list[str]:
        code = re.sub(r"//.*", "", self.texts[name])
        return [h for h, uses in USES.items() if h not in self.reached(name) and uses.search(code)]


def main(root: Path) -> int:
    files = Files(root)
    found = [f"{root / name}: #include <{h}>" for name in files.texts for h in files.missing(name)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:] or ["native"])))
