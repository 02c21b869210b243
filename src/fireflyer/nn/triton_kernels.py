"""Kernels in Triton's language. `triton_calls` launches them and documents their results."""

import triton
import triton.language as tl


@triton.jit
def activate(x, y, bits, count, slope, KIND: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < count
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        passes = (v <= 0) == 0  # NaN passes
        value = tl.where(v < 0, 0.0, v)
    elif KIND == 1:
        passes = (v > 0) & (v < 6)
        value = tl.where(v < 0, 0.0, v)
        value = tl.where(value > 6, 6.0, value)
    else:
        passes = v > 0
        value = tl.where(passes, v, v * slope)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
    eights = tl.reshape((passes & inside).to(tl.int32), (BLOCK // 8, 8))
    packed = tl.sum(eights << tl.arange(0, 8)[None, :], axis=1)
    byte = first // 8 + tl.arange(0, BLOCK // 8)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte * 8 < count)


@triton.jit
def select(g, bits, dx, count, slope, LEAKING: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < count
    byte = first // 8 + tl.arange(0, BLOCK // 8)
    packed = tl.load(bits + byte, mask=byte * 8 < count, other=0).to(tl.int32)
    passes = tl.reshape((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1, (BLOCK,))
    v = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(passes != 0, v, v * slope if LEAKING else 0.0)
    tl.store(dx + at, value.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "key", "other_key", "threshold"])
def drop(x, y, first, count, key, other_key, threshold, scale, BLOCK: tl.constexpr):
    at = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    h = at.to(tl.uint32) ^ tl.cast(key, tl.uint32)  # the hash of simd/noise.inl
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15) ^ tl.cast(other_key, tl.uint32)) * 0x846CA68B
    h = h ^ (h >> 16)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.where(h < tl.cast(threshold, tl.uint32), 0.0, scale)
    tl.store(y + at, (v * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gate(a, b, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (silu * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(g, a, b, da, db, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    dy = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    kind = da.dtype.element_ty
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
    inner = (dy * up).to(kind).to(tl.float32)
    tl.store(da + at, (inner * sigmoid * (1 + gate * (1 - sigmoid))).to(kind), mask=inside)
    tl.store(db + at, (dy * silu).to(kind), mask=inside)


@triton.jit
def norm(
    x, residual, weight, h, y, scales, width, eps,
    ADDED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    v = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        v += tl.load(residual + row * width + at, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(h.dtype.element_ty)
        tl.store(h + row * width + at, rounded, mask=inside)
        v = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(v * v, axis=0) / width + eps)
    tl.store(scales + row, scale)
    v *= scale
    if SCALED:
        v *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    h, weight, scales, g, gh, dh, parts, rows, width,
    ADDED: tl.constexpr, SCALED: tl.constexpr, WEIGHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < width
    dw = tl.zeros((BLOCK,), tl.float32)
    program = tl.program_id(0)
    for number in range(program, rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64) * width
        v = tl.load(h + row + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(g + row + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + number)
        if WEIGHED:
            dw += dy * v * scale
        if SCALED:
            dy *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        squares = tl.sum(dy * v, axis=0) * scale * scale * scale / width
        found = (dy * scale - v * squares).to(dh.dtype.element_ty)
        if ADDED:
            more = tl.load(gh + row + at, mask=inside, other=0.0).to(tl.float32)
            found = (found.to(tl.float32) + more).to(dh.dtype.element_ty)
        tl.store(dh + row + at, found, mask=inside)
    if WEIGHED:
        tl.store(parts + program.to(tl.int64) * width + at, dw, mask=inside)


@triton.jit(do_not_specialize=["ignored"])
def cross_entropy(
    logits, target, picked, classes, ignored, share, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * classes
    label = tl.load(target + row)
    valid = label != ignored
    most = -float("inf")
    total = 0.0
    for begin in range(0, classes, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(logits + at, mask=at < classes, other=-float("inf")).to(tl.float32)
        top = tl.maximum(most, tl.max(v, axis=0))
        total = total * tl.exp(most - top) + tl.sum(tl.exp(v - top), axis=0)
        most = top
    whole = most + tl.log(total)
    value = tl.load(logits + tl.where(valid, label, 0)).to(tl.float32) - whole
    tl.store(picked + row, value.to(picked.dtype.element_ty))
    if GRADIENT:
        for begin in range(0, classes, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            v = tl.load(logits + at, mask=at < classes, other=-float("inf")).to(tl.float32)
            p = tl.exp(v - whole)
            d = tl.where(at == label, p - 1, p) * tl.where(valid, -share, 0.0)
            tl.store(logits + at, d.to(logits.dtype.element_ty), mask=at < classes)
