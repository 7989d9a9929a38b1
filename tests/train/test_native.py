"""The trainer's C++ kernels against plain torch, for sizes that do and do not fill vectors, tiles and pages."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quintet.models.lora import Adapter
from quintet.models.native.compile import NativeUnavailable
from quintet.train.forward import PolicyForward
from quintet.train.fused_attention import Heads
from quintet.train.fused_ops import Ops, TorchOps
from quintet.train.native.adapters import adapters_backward, merge
from quintet.train.native.library import Library, choose_library, load_library
from quintet.train.native.ops import NativeOps
from quintet.train.packing import PackedRow, TokenSample, pack
from quintet.train.workspace import Gradients, Workspace
from quintet.types import QuintetError
from tests.train.helpers import random_samples, tiny_model


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load_library()
    except NativeUnavailable as reason:
        if " failed: " in str(reason):  # a compiler that is there must manage
            raise
        pytest.skip(str(reason))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, library: Library) -> torch.dtype:
    found: torch.dtype = request.param
    if not library.computes(found):
        pytest.skip(f"no {found} products on this processor")
    return found


def both(library: Library) -> tuple[Ops, Ops]:
    return NativeOps(library, Workspace()), TorchOps(Workspace())


def assert_alike(found: Tensor, expected: Tensor) -> None:
    """A low result may be rounded to the neighbour."""
    scale = float(expected.float().abs().max())
    unit = 2.0**-7 if found.dtype == torch.bfloat16 else 2e-6
    assert float((found.float() - expected.float()).abs().max()) <= unit * scale


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(1, 5), (9, 16), (40, 71), (33, 576)])
def test_norms(library: Library, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, width = shape
    x, weight, low, g = (
        torch.randn(shape),
        torch.rand(width),
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
    )
    results = []
    for ops in both(library):
        total, out, again, low_grad = torch.empty(shape), *(torch.empty(shape, dtype=dtype) for _ in range(3))
        inverse, grad = torch.empty(rows), torch.ones(shape)
        ops.norm(x, weight, 1e-5, out, inverse, (low, total))
        ops.norm_again(total, weight, inverse, again)
        grad_weight = ops.norm_backward(g, total, weight, inverse, grad, low_TE=low_grad, of_weight=True)
        assert grad_weight is not None
        assert ops.norm_backward(g, total, weight, inverse, torch.ones(shape), of_weight=False) is None
        results.append((total, out, again, inverse, grad, low_grad, grad_weight))
    for found, expected in zip(*results, strict=True):
        assert_alike(found, expected)


@pytest.mark.parametrize("shape", [(1, 3), (20, 48), (37, 77)])
def test_swiglu_sums_and_rotations(library: Library, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, width = shape
    gate_up, g = (20.0 * torch.randn(rows, 2 * width)).to(dtype), torch.randn(shape).to(dtype)
    x, qkv, angles = torch.randn(shape), torch.randn(rows, 5 * 2 * width).to(dtype), torch.randn(rows, 2 * width)
    results = []
    for ops in both(library):
        inner, grads, total = torch.empty(shape, dtype=dtype), torch.empty_like(gate_up), torch.empty(shape)
        ops.swiglu(gate_up, inner)
        ops.swiglu_backward(g, gate_up, grads)
        ops.add(x, g, total)
        turned, back = qkv.clone(), qkv.clone()
        ops.rotate(turned, 3, angles.cos(), angles.sin())
        ops.rotate(back, 3, angles.cos(), angles.sin(), back=True)
        results.append((inner, grads, total, turned, back))
    for found, expected in zip(*results, strict=True):
        assert_alike(found, expected)


def rows_of(prompts: list[tuple[int, list[int]]]) -> PackedRow:
    """Prompts with the lengths of their responses; a response of 1 token has no row of its own."""
    samples = [
        TokenSample([g + 1] * prompt, [2] * response, [1] * response)
        for g, (prompt, responses) in enumerate(prompts)
        for response in responses
    ]
    return pack(samples, shared_prompt=True, device=torch.device("cpu"))


LAYOUTS = {
    "one token": [(1, [1])],
    "several prompts": [(7, [5, 9, 1, 3, 4, 6]), (40, [70]), (33, [2, 65])],
    "long": [(300, [140, 64, 33]), (5, [290, 3])],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 2, 10), (3, 3, 64), (9, 3, 32)])
def test_attention(library: Library, dtype: torch.dtype, layout: str, heads: tuple[int, int, int]) -> None:
    """Compared with float32: no further from it than plain torch in the same dtype."""
    shape = Heads(*heads, heads[2] ** -0.5)
    row = rows_of(LAYOUTS[layout])
    n, width = row.input_ids_1T.numel(), (shape.queries + 2 * shape.keys) * shape.size
    qkv, grad = torch.randn(n, width).to(dtype), torch.randn(n, shape.queries * shape.size).to(dtype)
    native, plain = both(library)
    exact = attend(plain, row, shape, qkv.float(), grad.float())
    usual = attend(plain, row, shape, qkv, grad)
    for found, expected, other in zip(attend(native, row, shape, qkv, grad), exact, usual, strict=True):
        bound = 1.2 * float((other.float() - expected).norm()) + 2e-6 * float(expected.norm())
        assert float((found.float() - expected).norm()) <= bound


def attend(ops: Ops, row: PackedRow, heads: Heads, qkv: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    plan = ops.plan(row)
    out, lse, grads = torch.empty_like(grad), torch.empty(len(qkv), heads.queries), torch.full_like(qkv, torch.nan)
    ops.attention(qkv, heads, plan, out, lse)
    ops.attention_backward(grad, qkv, heads, plan, out, lse, grads)
    return out, lse, grads


def test_a_nan_of_an_earlier_call_does_not_come_back(library: Library) -> None:
    """The kernels keep their scratch memory."""
    native, heads = NativeOps(library, Workspace()), Heads(4, 2, 24, 0.2)
    row, small = rows_of(LAYOUTS["long"]), rows_of([(7, [5, 9])])
    n, m = row.input_ids_1T.numel(), small.input_ids_1T.numel()
    attend(native, row, heads, torch.full((n, 192), torch.nan), torch.full((n, 96), torch.nan))
    assert all(x.isfinite().all() for x in attend(native, small, heads, torch.randn(m, 192), torch.randn(m, 96)))


@pytest.mark.parametrize("vocabulary", [3, 48, 1000])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_softmax_over_the_vocabulary(
    library: Library, dtype: torch.dtype, vocabulary: int, *, with_entropy: bool
) -> None:
    logits, factor = (4.0 * torch.randn(7, vocabulary)).to(dtype), 1.0 / 0.7
    logits[0, 1:] = -300.0  # everything on one token
    target, weight = torch.randint(vocabulary, (7,)), torch.randn(7)
    z = (logits.double() * factor).requires_grad_()
    logp = z.log_softmax(-1)
    expected = (z.logsumexp(-1), logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1))
    loss = (expected[1] * weight).sum() + (expected[2].square().sum() if with_entropy else 0.0)
    (grad_z,) = torch.autograd.grad(loss, z)
    found = lse, _, entropy = tuple(torch.empty(7) for _ in range(3))
    library.call("head_statistics", dtype, 7, vocabulary, logits, factor, target, *found)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-5, atol=2e-5)
    to_entropy = 2.0 * entropy if with_entropy else None
    library.call("head_gradient", dtype, 7, vocabulary, logits, factor, target, lse, entropy, weight, to_entropy)
    assert_alike(logits, grad_z * factor)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_bits_do_not_depend_on_the_number_of_threads(library: Library, dtype: torch.dtype) -> None:
    native, heads, row = NativeOps(library, Workspace()), Heads(4, 2, 32, 0.2), rows_of(LAYOUTS["several prompts"])
    n = row.input_ids_1T.numel()
    qkv, grad, x = torch.randn(n, 256).to(dtype), torch.randn(n, 128).to(dtype), torch.randn(n, 128)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        sums = native.norm_backward(grad, x, torch.ones(128), torch.ones(n), torch.zeros(n, 128), of_weight=True)
        assert sums is not None
        results.append((*attend(native, row, heads, qkv, grad), sums))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def adapter(inputs: int, outputs: int, rank: int, scale: float = 0.5) -> Adapter:
    return Adapter(torch.randn(rank, inputs, requires_grad=True), torch.randn(outputs, rank, requires_grad=True), scale)


def expected_grads(x: Tensor, grad: Tensor, one: Adapter, first: int) -> tuple[Tensor, Tensor]:
    """Of `down` and `up`, float64."""
    x, g = x.double(), grad[:, first : first + len(one.up)].double()
    down, up = one.down.detach().double(), one.up.detach().double()
    return one.scale * (g @ up).t() @ x, one.scale * g.t() @ (x @ down.t())


def assert_near(found: Tensor | None, expected: Tensor, tolerance: float) -> None:
    assert found is not None
    assert float((found.double() - expected).norm()) <= tolerance * float(expected.norm())


ADAPTED = [  # rows, inputs, each adapter's outputs and rank
    (1, 3, [(5, 1)]),
    (17, 31, [(33, 8)]),
    (130, 576, [(576, 16), (192, 16), (192, 16)]),
    (67, 515, [(129, 40), (1031, 7)]),
    (200, 1536, [(576, 32)]),
]


@pytest.mark.parametrize("shape", ADAPTED, ids=str)
def test_gradients_of_adapters(
    library: Library, dtype: torch.dtype, shape: tuple[int, int, list[tuple[int, int]]]
) -> None:
    """Sums are float32 whatever the dtype of what goes in; a second call adds to them."""
    rows, inputs, layers = shape
    adapters = [adapter(inputs, outputs, rank, 0.5 + i) for i, (outputs, rank) in enumerate(layers)]
    firsts = [sum(outputs for outputs, _ in layers[:i]) for i in range(len(layers))]
    x, grad = torch.randn(rows, inputs).to(dtype), torch.randn(rows, sum(o for o, _ in layers)).to(dtype)
    gradients = Gradients()
    for times in (1, 2):
        adapters_backward(library, x, grad, list(zip(adapters, firsts, strict=True)), gradients)
        for one, first in zip(adapters, firsts, strict=True):
            for parameter, expected in zip(one[:2], expected_grads(x, grad, one, first), strict=True):
                assert_near(parameter.grad, times * expected, 2e-6)


def test_two_adapters_of_one_layer_and_frozen_factors(library: Library, dtype: torch.dtype) -> None:
    adapters = [adapter(48, 40, 4), adapter(48, 40, 20)]
    adapters[0].down.requires_grad_(False)
    adapters[1].up.requires_grad_(False)
    x, grad = torch.randn(50, 48).to(dtype), torch.randn(50, 40).to(dtype)
    adapters_backward(library, x, grad, [(one, 0) for one in adapters], Gradients())
    assert adapters[0].down.grad is None and adapters[1].up.grad is None
    assert_near(adapters[0].up.grad, expected_grads(x, grad, adapters[0], 0)[1], 2e-6)
    assert_near(adapters[1].down.grad, expected_grads(x, grad, adapters[1], 0)[0], 2e-6)


@pytest.mark.usefixtures("one_thread")
def test_bits_of_adapters_do_not_depend_on_the_number_of_threads(library: Library, dtype: torch.dtype) -> None:
    one, x, grad = adapter(300, 200, 16), torch.randn(150, 300).to(dtype), torch.randn(150, 200).to(dtype)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        one.down.grad = one.up.grad = None
        adapters_backward(library, x, grad, [(one, 0)], Gradients())
        assert one.down.grad is not None and one.up.grad is not None
        results.append((one.down.grad, one.up.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_nan_does_not_come_back_through_adapters(library: Library, dtype: torch.dtype) -> None:
    for value in (torch.nan, 1.0):
        one, rows = adapter(70, 90, 5), 40 if value != 1.0 else 7
        x, grad = torch.full((rows, 70), value, dtype=dtype), torch.full((rows, 90), value, dtype=dtype)
        adapters_backward(library, x, grad, [(one, 0)], Gradients())
    assert one.down.grad is not None and one.up.grad is not None
    assert one.down.grad.isfinite().all() and one.up.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(1, 3), (8, 32), (37, 71), (192, 576)])
@pytest.mark.parametrize("ranks", [[], [1], [16], [8, 40]], ids=str)
def test_weights_with_their_adapters(
    library: Library, dtype: torch.dtype, shape: tuple[int, int], ranks: list[int]
) -> None:
    outputs, inputs = shape
    base, out = torch.randn(shape), torch.full(shape, torch.nan, dtype=dtype)
    adapters = [adapter(inputs, outputs, rank, 0.3 + i) for i, rank in enumerate(ranks)]
    merge(library, base, adapters, out)
    expected = base.double() + sum(a.scale * (a.up @ a.down).detach().double() for a in adapters)
    assert_near(out, expected, 1e-6 if dtype == torch.float32 else 2.0**-8)


def test_the_choice(library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_library("auto", torch.float32) is library
    assert choose_library("torch", torch.float32) is None

    def unavailable() -> Library:
        raise NativeUnavailable("there is no C++ compiler 'g++' on PATH")

    monkeypatch.setattr("quintet.train.native.library.load_library", unavailable)
    with caplog.at_level(logging.INFO, "quintet"):
        forward = PolicyForward(tiny_model())
    assert "the slower torch path runs, because there is no C++ compiler" in caplog.text
    assert forward(random_samples(0, [(5, [3])])).logprobs_BT.isfinite().all()
    with pytest.raises(QuintetError, match=r"train\.kernels: native cannot run here: there is no C\+\+ compiler"):
        PolicyForward(tiny_model(), fused_kernels="native")
