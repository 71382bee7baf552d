"""Chunks with decays per key channel (rows of the state), per value channel (columns), or both.

    S' = a S b + (k * suf_a)^T (v * suf_b)                      a, b: products of the chunk's row and column decays
    o_t = scale * (pre_b[t] * ((q_t * pre_a[t]) S)  +  what the chunk's own rows s <= t give)

Rows of the chunk meet at the levels of a tree (`tree`): at level h right halves are q * decay, left halves k * decay, and their
scores one product P P^T of all rows, masked to the level's pairs. A weakly gated chunk of bfloat16 has fewer levels, or none.
The backward pass has the same shape with (q, k, a) and (do, v, b) in each other's place; gradients of the gates are sums of
what each level gives.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels._pallas._launch import Input, Refs
from ejkernel.kernels._pallas._products import column_sums, row_sums
from ejkernel.kernels._pallas.linear._plan import Blocks
from ejkernel.kernels._pallas.linear.kernels.scan import Adjoints, Scan, Tokens, read_adjoint
from ejkernel.kernels._pallas.linear.kernels.tree import (
    BASE,
    Factor,
    Tree,
    before,
    choose,
    inside,
    meet_anywhere,
    meeting,
    right_rows,
    steps,
    times,
    with_right_rows,
)

Array = jax.Array
# The largest log decay for factors exp(prefix) and exp(-prefix): over a whole chunk in the forward pass; over BASE rows in the
# backward pass, where the gate's gradient is a difference of products in bfloat16 and loses digits as decays get stronger.
# Gates of keys and of values lose them together, so with both the rows are half as many, and so is the limit.
WEAK_FORWARD, WEAK_BACKWARD = 30.0, 3.0


class Channels(NamedTuple):
    """Log decays per channel as `Blocks` arranges them, none below `LEAST_LOG`, with their heads."""

    gk: Array | None
    gv: Array | None
    gk_heads: int | None
    gv_heads: int | None

    def inputs(self, blocks: Blocks) -> dict[str, Input | None]:
        gk = None if self.gk_heads is None else Input(self.gk, blocks.token_spec(self.gk_heads, blocks.K))  # type: ignore[arg-type]
        gv = None if self.gv_heads is None else Input(self.gv, blocks.token_spec(self.gv_heads, blocks.V))  # type: ignore[arg-type]
        return {"gk": gk, "gv": gv}


class Chunk(NamedTuple):
    """One head's rows of a chunk."""

    blocks: Blocks
    q: Array  # [C, K]
    k: Array  # [C, K]
    v: Array  # [C, V]
    gk: Array | None  # [C, K]
    gv: Array | None  # [C, V]
    weak: bool

    @classmethod
    def read(cls, tokens: Tokens, gates: Channels, refs: Refs, h: int, weak: bool) -> Chunk:
        blocks = tokens.blocks
        gk = None if gates.gk_heads is None else blocks.read(refs["gk"], h, blocks.K, gates.gk_heads)
        gv = None if gates.gv_heads is None else blocks.read(refs["gv"], h, blocks.V, gates.gv_heads)
        q, k, v = (x.astype(jnp.float32) for x in tokens.read(refs, h))
        return cls(blocks, q, k, v, gk, gv, weak)

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def base(self) -> int:
        return _base(self.rows, 1 if self.gk is None or self.gv is None else 2) if self.weak else 1

    def factors(self, which: Array) -> tuple[Factor | None, Factor | None]:
        """Of rows q and k, and of rows v and do."""
        of = lambda gate: None if gate is None else Factor.of(self.blocks.plan.products, which, gate)
        return of(self.gk), of(self.gv)

    def trees(self) -> tuple[Tree | None, Tree | None]:
        """The sums of both gates."""
        of = lambda gate: None if gate is None else Tree.of(self.blocks.plan.products, gate, self.base)
        return of(self.gk), of(self.gv)

    def whole(self) -> Array:
        """`[K, V]`: the decay of the state by the chunk."""
        log = jnp.zeros((self.q.shape[1], self.v.shape[1]), jnp.float32)
        if self.gk is not None:
            log += self.blocks.plan.products.spread_sums(self.gk, self.v.shape[1])
        if self.gv is not None:
            log += column_sums(self.gv.astype(jnp.float32))
        return jnp.exp(log)


def forward(tokens: Tokens, gates: Channels, initial: Array, keep: bool) -> tuple[Array, Array, Array | None]:
    """(output, final states, the state before each chunk if they are kept)."""
    return _scan(tokens, gates).forward(lambda refs: _forward(tokens, gates, refs), initial, keep)


def backward(tokens: Tokens, gates: Channels, given: Adjoints) -> dict[str, Array]:
    """The gradients `dq`, `dk`, `dv`, `dgk`, `dgv` (for all H heads) and `dinitial`."""
    blocks = tokens.blocks
    of_gate = lambda gate, D: None if gate is None else blocks.token_output(D, jnp.float32)
    of_gates = {"dgk": of_gate(gates.gk, blocks.K), "dgv": of_gate(gates.gv, blocks.V)}
    return _scan(tokens, gates).backward(lambda refs: _backward(tokens, gates, refs), given, of_gates)


def _scan(tokens: Tokens, gates: Channels) -> Scan:
    return Scan("channel_gates", tokens, gates.inputs(tokens.blocks), {})


def _base(rows: int, given: int) -> int:
    """Rows of a block of a weakly gated chunk in the backward pass, with so many gates."""
    return min(BASE // given, rows)


def _for_each_kind(blocks: Blocks, gates: Channels, refs: Refs, base: int, limit: float, body: Any) -> None:
    """`body(weak)` as the chunk's gates ask for; only bfloat16 operands leave room for the factors of weak gates.

    A chunk is weakly gated when the log decays of every channel add up to at most `limit` over each `base` of its rows.
    """
    if not blocks.plan.narrow:
        body(False)
        return
    weak = []
    for name, heads, D in (("gk", gates.gk_heads, blocks.K), ("gv", gates.gv_heads, blocks.V)):
        if heads is not None:
            of_each = range(0, blocks.together, blocks.together // blocks.own(heads))
            rows = (jnp.abs(blocks.read(refs[name], h, D, heads).astype(jnp.float32)) for h in of_each)
            added = (jnp.sum(x.reshape(-1, base, D), axis=1) for x in rows)  # [C / base, D]
            weak.append(jnp.max(functools.reduce(jnp.maximum, added)) <= limit)
    all_weak = functools.reduce(jnp.logical_and, weak)
    pl.when(all_weak)(lambda: body(True))
    pl.when(jnp.logical_not(all_weak))(lambda: body(False))


def _forward(tokens: Tokens, gates: Channels, refs: Refs) -> None:
    blocks, S_ref = tokens.blocks, refs["S"]

    def heads(weak: bool) -> None:
        compute = _weak_forward if weak else _exact_forward
        for h in range(blocks.together):
            output, S_ref[h] = compute(Chunk.read(tokens, gates, refs, h, weak), S_ref[h])
            blocks.write(refs["output"], h, output * blocks.plan.scale)

    _for_each_kind(blocks, gates, refs, blocks.rows, WEAK_FORWARD, heads)


def _weak_forward(chunk: Chunk, S: Array) -> tuple[Array, Array]:
    """(output [C, V] before its scale, state after the chunk [K, V]), by factors exp(prefix) and exp(-prefix)."""
    mm, C = chunk.blocks.plan.products, chunk.rows
    causal = inside(C, C)
    a, a_v = chunk.factors(causal)
    b, b_v = _reciprocal(a), _reciprocal(a_v)
    x, y, z = times(chunk.q, a), times(chunk.k, b), times(chunk.v, b_v)  # [C, K], [C, K], [C, V]
    scores = jnp.where(causal, mm.nt(x, y), 0.0)  # [C, C]
    output = times(mm.nn(x, S) + mm.nn(scores, z), a_v)  # [C, V]
    return output, chunk.whole() * S + mm.tn(_times_last(y, a), _times_last(z, a_v))


def _reciprocal(factor: Factor | None) -> Factor | None:
    return None if factor is None else factor.reciprocal()


def _times_last(rows: Array, prefix: Factor | None) -> Array:
    """Rows that were divided by their prefix, times that of the whole chunk: times their suffix."""
    return rows if prefix is None else rows * prefix.factor[-1:]


def _exact_forward(chunk: Chunk, S: Array) -> tuple[Array, Array]:
    """The same along the whole tree."""
    mm, C, (q, k, v) = chunk.blocks.plan.products, chunk.rows, (chunk.q, chunk.k, chunk.v)
    tree, tree_v = chunk.trees()
    pre, suf, pre_v, suf_v = (*_ends(tree), *_ends(tree_v))
    output = _by(mm.nn(_by(q, pre), S), pre_v) + row_sums(q * k) * v  # [C, V]
    S = chunk.whole() * S + mm.tn(_by(k, suf), _by(v, suf_v))
    scores = jnp.zeros((C, C), jnp.float32)  # of the levels, where they share v
    for h in steps(1, C):
        factor, factor_v = _at(tree, h), _at(tree_v, h)
        P = _by(choose(h, q, k), factor)  # [C, K]
        level, meet = mm.nt(right_rows(h, P), P), right_rows(h, meeting(h, C))  # [C or C / 2, C]
        if factor_v is None:
            scores = with_right_rows(h, scores, jnp.where(meet, level, right_rows(h, scores)))
        else:
            part = mm.nn(jnp.where(meet, level, 0.0), v * factor_v) * right_rows(h, factor_v)  # [C or C / 2, V]
            output = with_right_rows(h, output, right_rows(h, output) + part)
    return output + mm.nn(scores, v) if chunk.gv is None else output, S


def _by(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor


def _ends(tree: Tree | None) -> tuple[Array | None, Array | None]:
    """The decays from the chunk's start to each row, and from it to the chunk's end."""
    return (None, None) if tree is None else (jnp.exp(tree.pre), jnp.exp(tree.suf))


def _at(tree: Tree | None, h: int) -> Array | None:
    """The factors of a level."""
    return None if tree is None else jnp.exp(tree.levels[h])


class OfSums:
    """The gradients of a tree's sums, as they are found."""

    def __init__(self, tree: Tree | None) -> None:
        self.tree = tree
        self.levels: dict[int, Array] = {}
        self.ends: tuple[Array, Array] | None = None
        self.blocks: Array | None = None

    def of_gate(self) -> Array | None:
        """`[C, D]`: the gradient of the log decays."""
        if self.tree is None:
            return None
        assert self.ends is not None
        return self.tree.gradient(self.levels, *self.ends, blocks=self.blocks)


class Grads(NamedTuple):
    """Gradients of a chunk's rows."""

    dq: Array  # [C, K]
    dk: Array  # [C, K]
    dv: Array  # [C, V]


def _backward(tokens: Tokens, gates: Channels, refs: Refs) -> None:
    blocks, dS_ref = tokens.blocks, refs["dS"]

    def heads(weak: bool) -> None:
        for h in range(blocks.together):
            chunk, do = Chunk.read(tokens, gates, refs, h, weak), read_adjoint(blocks, refs, h)
            grads, dS_ref[h] = _chunk_backward(chunk, refs["starts"][0, 0, h], dS_ref[h], do)
            for name, grad in grads.items():
                if grad is not None:
                    blocks.write(refs[name], h, grad)

    given = sum(gate is not None for gate in (gates.gk, gates.gv))
    _for_each_kind(blocks, gates, refs, _base(blocks.rows, given), WEAK_BACKWARD / given, heads)


def _chunk_backward(chunk: Chunk, S: Array, dS: Array, do: Array) -> tuple[dict[str, Array | None], Array]:
    """(gradients of rows and log decays, adjoint of the state before the chunk [K, V])."""
    sums, sums_v = (OfSums(tree) for tree in chunk.trees())
    grads, dS = _through_state(chunk, sums, sums_v, S, dS, do)
    z, n = row_sums(do * chunk.v), row_sums(chunk.q * chunk.k)  # [C, 1]: a row's own key and value, with no decay between them
    grads = Grads(grads.dq + z * chunk.k, grads.dk + z * chunk.q, grads.dv + n * do)
    among = _by_keys if chunk.gv is None else _by_keys_and_values
    grads = among(chunk, sums, sums_v, do, grads)
    return {**grads._asdict(), "dgk": sums.of_gate(), "dgv": sums_v.of_gate()}, dS


def _by_keys(chunk: Chunk, sums: OfSums, _: OfSums, do: Array, grads: Grads) -> Grads:
    """Rows of the chunk among themselves, without a gate of the values: their scores are added up, and so are the products."""
    mm, C, (q, k, v) = chunk.blocks.plan.products, chunk.rows, (chunk.q, chunk.k, chunk.v)
    dov, vdo = mm.nt(do, v), mm.nt(v, do)  # [C, C]: of rows t >= s, and of rows t <= s
    scores = jnp.zeros((C, C), jnp.float32)
    dq, dk, dv = grads
    tree = sums.tree
    assert tree is not None
    if chunk.weak:
        which = before(chunk.base, C)
        a, b = jnp.exp(tree.blocks), jnp.exp(-tree.blocks)
        x, y = q * a, k * b  # [C, K]
        dA = jnp.where(which, dov, 0.0)  # [C, C]
        scores = jnp.where(which, mm.nt(x, y), 0.0)
        dx, dy = mm.nn(dA, y), mm.tn(dA, x)  # [C, K]
        dq, dk, sums.blocks = dq + dx * a, dk + dy * b, dx * x - dy * y
    for h in steps(chunk.base, C):
        factor = jnp.exp(tree.levels[h])
        P = choose(h, q, k) * factor  # [C, K]
        level, meet = mm.nt(right_rows(h, P), P), right_rows(h, meeting(h, C))  # [C or C / 2, C]
        scores = with_right_rows(h, scores, jnp.where(meet, level, right_rows(h, scores)))
        dP = mm.nn(jnp.where(meet_anywhere(h, C), choose(h, dov, vdo), 0.0), P)  # [C, K]
        down = dP * factor
        dq, dk, sums.levels[h] = choose(h, dq + down, dq), choose(h, dk, dk + down), dP * P
    return Grads(dq, dk, dv + mm.tn(scores, do))


def _by_keys_and_values(chunk: Chunk, sums: OfSums, sums_v: OfSums, do: Array, grads: Grads) -> Grads:
    """The same with a gate of the values, by which every level has products of its own."""
    mm, C, (q, k, v) = chunk.blocks.plan.products, chunk.rows, (chunk.q, chunk.k, chunk.v)
    dq, dk, dv = _inside_blocks(chunk, sums, sums_v, do, grads) if chunk.weak else grads
    for h in steps(chunk.base, C):
        factor, factor_v = _at(sums.tree, h), _at(sums_v.tree, h)
        meet = meet_anywhere(h, C)
        P, Pv = _by(choose(h, q, k), factor), _by(choose(h, do, v), factor_v)  # [C, K], [C, V]
        dP = mm.nn(jnp.where(meet, mm.nt(Pv, Pv), 0.0), P)  # [C, K]
        dPv = mm.nn(jnp.where(meet, mm.nt(P, P), 0.0), Pv)  # [C, V]
        down = _by(dP, factor)
        dq, dk, dv = choose(h, dq + down, dq), choose(h, dk, dk + down), choose(h, dv, dv + _by(dPv, factor_v))
        sums.levels[h], sums_v.levels[h] = dP * P, dPv * Pv
    return Grads(dq, dk, dv)


def _through_state(chunk: Chunk, sums: OfSums, sums_v: OfSums, S: Array, dS: Array, do: Array) -> tuple[Grads, Array]:
    """What the states before and after the chunk give, and the adjoint of the one before."""
    mm, C, (q, k, v) = chunk.blocks.plan.products, chunk.rows, (chunk.q, chunk.k, chunk.v)
    pre, suf, pre_v, suf_v = (*_ends(sums.tree), *_ends(sums_v.tree))
    x, w, xv, wv = _by(q, pre), _by(k, suf), _by(do, pre_v), _by(v, suf_v)
    dx, dw, dwv = mm.nt(xv, S), mm.nt(wv, dS), mm.nn(w, dS)  # [C, K], [C, K], [C, V]
    whole = chunk.whole()  # [K, V]
    through = whole * S * dS  # [K, V]
    last = jax.lax.broadcasted_iota(jnp.int32, (C, 1), 0) == C - 1
    if pre is not None:
        sums.ends = dx * x + jnp.where(last, mm.row_sums_in_a_row(through), 0.0), dw * w  # [C, K]
    if pre_v is not None:
        sums_v.ends = mm.nn(x, S) * xv + jnp.where(last, column_sums(through), 0.0), dwv * wv  # [C, V]
    return Grads(_by(dx, pre), _by(dw, suf), _by(dwv, suf_v)), whole * dS + mm.tn(x, xv)


def _inside_blocks(chunk: Chunk, sums: OfSums, sums_v: OfSums, do: Array, grads: Grads) -> Grads:
    """Rows s < t of the same block of a weakly gated chunk."""
    mm, C = chunk.blocks.plan.products, chunk.rows
    which = before(chunk.base, C)
    (a, b), (a_v, b_v) = (_in_blocks(of.tree) for of in (sums, sums_v))
    x, y, xv, yv = _by(chunk.q, a), _by(chunk.k, b), _by(do, a_v), _by(chunk.v, b_v)
    A, dA = (jnp.where(which, mm.nt(*rows), 0.0) for rows in ((x, y), (xv, yv)))  # [C, C]
    dx, dy, dyv = mm.nn(dA, y), mm.tn(dA, x), mm.tn(A, xv)  # [C, K], [C, K], [C, V]
    sums.blocks, sums_v.blocks = dx * x - dy * y, mm.nn(A, yv) * xv - dyv * yv
    return Grads(grads.dq + _by(dx, a), grads.dk + _by(dy, b), grads.dv + _by(dyv, b_v))


def _in_blocks(tree: Tree | None) -> tuple[Array | None, Array | None]:
    """exp(prefix) and exp(-prefix) inside the blocks that a tree starts from."""
    return (None, None) if tree is None else (jnp.exp(tree.blocks), jnp.exp(-tree.blocks))
