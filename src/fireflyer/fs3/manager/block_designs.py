"""Balanced incomplete block designs, by construction.

A design is a set of blocks of `r` out of `n` points. Each point is in `t` blocks, and each pair of
points is in equally many blocks.

Known constructions: pairs by round robin, all subsets, projective and affine planes over finite
fields, Bose's triple systems; and difference families, found by search and developed cyclically.
"""

import itertools
import math
from collections.abc import Callable, Iterator

Block = tuple[int, ...]

SEARCH_STEPS = 200_000
"""Maximum number of steps of the search for a difference family: a few tenths of a second."""
MOST_SUBSETS = 20_000
"""Maximum number of blocks of a design that consists of all subsets."""
LARGEST_FAMILY = 300
"""Maximum number of points in all base blocks together, which is the depth of the search."""


def balanced_design(n: int, t: int, r: int) -> list[Block] | None:
    """Returns the blocks, or None if no construction here gives them.

    A construction makes a design with one value of `t`; repeated blocks give designs with multiples
    of that value.
    """
    if t * (r - 1) % (n - 1) or n * t % r:
        return None
    makers: tuple[Callable[[int, int], list[Block] | None], ...] = (
        _pairs,
        _projective_plane,
        _affine_plane,
        _bose_triples,
        _all_subsets,
    )
    for make in makers:
        blocks = make(n, r)
        if blocks and n * t % (r * len(blocks)) == 0:
            return blocks * (n * t // (r * len(blocks)))
    return _difference_family(n, t, r)


def round_robin(n: int) -> Iterator[list[Block]]:
    """Yields rounds of disjoint pairs; each pair occurs in exactly one round (n even)."""
    ring = list(range(1, n))
    for turn in range(n - 1):
        turned = [0, *ring[turn:], *ring[:turn]]
        yield [(turned[at], turned[n - 1 - at]) for at in range(n // 2)]


def _pairs(n: int, r: int) -> list[Block] | None:
    return list(itertools.combinations(range(n), 2)) if r == 2 else None


def _all_subsets(n: int, r: int) -> list[Block] | None:
    if math.comb(n, r) > MOST_SUBSETS:
        return None
    return list(itertools.combinations(range(n), r))


def _projective_plane(n: int, r: int) -> list[Block] | None:
    """Returns the lines of the plane over GF(q): q + 1 points each."""
    q = r - 1
    field = Field.of(q) if n == q * q + q + 1 else None
    if field is None:
        return None
    points = [
        *((1, y, z) for y in range(q) for z in range(q)),
        *((0, 1, z) for z in range(q)),
        (0, 0, 1),
    ]

    def on(point: Block, line: Block) -> bool:
        total = 0
        for a, b in zip(point, line, strict=True):
            total = field.add[total][field.multiply[a][b]]
        return total == 0

    return [tuple(at for at, p in enumerate(points) if on(p, line)) for line in points]


def _affine_plane(n: int, r: int) -> list[Block] | None:
    """Returns the lines y = m x + c and x = c over GF(q): q points each."""
    q = r
    field = Field.of(q) if n == q * q else None
    if field is None:
        return None
    blocks = [tuple(q * c + y for y in range(q)) for c in range(q)]
    for m, c in itertools.product(range(q), repeat=2):
        blocks.append(tuple(q * x + field.add[field.multiply[m][x]][c] for x in range(q)))
    return blocks


def _bose_triples(n: int, r: int) -> list[Block] | None:
    """Returns triples of Z_m x {0, 1, 2}, m odd.

    A triple is a column, or two points of a layer and their mean in the next layer.
    """
    if r != 3 or n % 6 != 3:
        return None
    m = n // 3
    half = (m + 1) // 2  # half of 1, modulo m
    blocks: list[Block] = [(x, m + x, 2 * m + x) for x in range(m)]
    for layer in range(3):
        above = (layer + 1) % 3 * m
        for x, y in itertools.combinations(range(m), 2):
            blocks.append((layer * m + x, layer * m + y, above + (x + y) * half % m))
    return blocks


def _difference_family(n: int, t: int, r: int) -> list[Block] | None:
    """Returns all shifts, modulo n, of base blocks that the search finds, or None.

    The differences inside the base blocks give each non-zero number modulo n equally often.
    """
    least = math.lcm(r, (n - 1) // math.gcd(n - 1, r - 1))
    if t % least or least > LARGEST_FAMILY:
        return None
    times = least * (r - 1) // (n - 1)
    left = [0, *([times] * (n - 1))]  # remaining uses of each difference
    steps = SEARCH_STEPS

    def take(block: list[int], point: int) -> list[int] | None:
        """Uses up the differences between `point` and the points of a block, and returns them.

        Returns None if a difference has no use left.
        """
        taken: list[int] = []
        for other in block:
            for difference in ((point - other) % n, (other - point) % n):
                if not left[difference]:
                    give(taken)
                    return None
                left[difference] -= 1
                taken.append(difference)
        return taken

    def give(taken: list[int]) -> None:
        for difference in taken:
            left[difference] += 1

    def extend(blocks: list[list[int]]) -> list[list[int]] | None:
        nonlocal steps
        if steps <= 0:
            return None
        steps -= 1
        block = blocks[-1]
        if len(block) == r:
            if not any(left):
                return blocks
            return extend([*blocks, [0]])
        # A new block takes the smallest difference that is left, because some block must have it.
        first = next(d for d in range(1, n) if left[d]) if len(block) == 1 else block[-1] + 1
        for point in (first,) if len(block) == 1 else range(first, n):
            taken = take(block, point)
            if taken is None:
                continue
            found = extend([*blocks[:-1], [*block, point]])
            if found:
                return found
            give(taken)
        return None

    family = extend([[0]])
    if family is None:
        return None
    blocks = [tuple((x + shift) % n for x in base) for base in family for shift in range(n)]
    return blocks * (t // least)


class Field:
    """GF(q) as tables of sums and products.

    Elements are polynomials over GF(p), as digits to the base p.
    """

    def __init__(self, p: int, degree: int, modulus: int) -> None:
        self.p, self.q = p, p**degree
        self.modulus = self._digits(modulus, degree + 1)
        elements = [self._digits(x, degree) for x in range(self.q)]
        self.add = [
            [self._number([(u + v) % p for u, v in zip(a, b, strict=True)]) for b in elements]
            for a in elements
        ]
        self.multiply = [[self._number(self._product(a, b)) for b in elements] for a in elements]

    @classmethod
    def of(cls, q: int) -> "Field | None":
        """Returns the field; None if `q` is no power of a prime."""
        p = next((p for p in range(2, q + 1) if q % p == 0), None)
        if p is None or p ** round(math.log(q, p)) != q:
            return None
        for modulus in range(q, 2 * q):  # monic, of the right degree
            field = cls(p, round(math.log(q, p)), modulus)
            if all(0 not in row[1:] for row in field.multiply[1:]):
                return field
        raise AssertionError(f"no irreducible polynomial for GF({q})")

    def _digits(self, x: int, count: int) -> list[int]:
        return [x // self.p**at % self.p for at in range(count)]

    def _number(self, digits: list[int]) -> int:
        return sum(digit * self.p**at for at, digit in enumerate(digits))

    def _product(self, a: list[int], b: list[int]) -> list[int]:
        degree = len(self.modulus) - 1
        product = [0] * (2 * degree)
        for (i, u), (j, v) in itertools.product(enumerate(a), enumerate(b)):
            product[i + j] = (product[i + j] + u * v) % self.p
        for at in range(2 * degree - 1, degree - 1, -1):
            factor = product[at]
            for i, m in enumerate(self.modulus):
                product[at - degree + i] = (product[at - degree + i] - factor * m) % self.p
        return product[:degree]
