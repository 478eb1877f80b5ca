"""Function transforms, forward mode, custom functions, hooks, checkpoints and modes of autograd, as in eager."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from harness import NoSync, Program, Sync, SyncAt, assert_like_eager, assert_same, count, grid
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import lazy_backend
from lazy_backend import config, metrics

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def leaf(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return grid(device, *shape, dtype=dtype).div_(10).requires_grad_()


def complex_grid(device: str) -> torch.Tensor:
    return torch.complex(torch.arange(4.0), torch.ones(4)).to(device)


def wave(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x**2).sum()


# ----- torch.func


@program
def gradient_of_a_gradient(device: str, sync: Sync):
    return (grad(lambda x: grad(wave)(x).sum())(grid(device, 4)),)


@program
def gradient_per_sample(device: str, sync: Sync):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    sync()

    def loss(parameters, x):
        return functional_call(model, parameters, (x[None],)).square().sum()

    return vmap(grad(loss), in_dims=(None, 0))(parameters, grid(device, 5, 3))


@program
def jvp_and_vjp(device: str, sync: Sync):
    x = grid(device, 4)
    out, tangent = jvp(torch.tanh, (x,), (x + 1,))
    sync()
    value, pull = vjp(torch.tanh, x)
    return out, tangent, value, *pull(x)


@program
def jacobians(device: str, sync: Sync):
    x = grid(device, 3)
    made = [jacrev(lambda x: x.outer(x).sin())(x), jacfwd(lambda x: x.outer(x).sin())(x)]
    sync()
    return [*made, hessian(wave)(x)]


@program
def an_ensemble(device: str, sync: Sync):
    torch.manual_seed(0)
    models = [nn.Linear(3, 2).to(device) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    sync()
    out = vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)), in_dims=(0, 0, None))(
        parameters, buffers, grid(device, 4, 3)
    )
    out.sum().backward()
    return out, parameters["weight"].grad


@program
def writes_under_vmap(device: str, sync: Sync):
    def write(x):
        y = x.clone()
        y.add_(1)
        y[0] = 5.0
        y.view(-1)[1:].mul_(2)
        return y

    return vmap(write)(grid(device, 3, 4)), vmap(write, chunk_size=2)(grid(device, 3, 4))


@program
def functionalized(device: str, sync: Sync):
    def write(x):
        y = x.clone()
        y.view(-1)[1:].add_(2)
        return y

    return (torch.func.functionalize(write)(grid(device, 4)),)


# ----- forward mode


@program
def dual_numbers(device: str, sync: Sync):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(grid(device, 4), grid(device, 4) + 1)
        y = x.sin() * x
        y[1:].add_(2)
        y.mul_(x)
        sync()
        return tuple(forward_ad.unpack_dual(y))


@program
def dual_parameters(device: str, sync: Sync):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in model.named_parameters()}
        return (forward_ad.unpack_dual(functional_call(model, duals, (grid(device, 4, 3),))).tangent,)


@program
def forward_over_reverse(device: str, sync: Sync):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(leaf(device, 4), grid(device, 4))
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        sync()
        return (forward_ad.unpack_dual(gradient).tangent,)


def test_forward_mode_cuts_nothing() -> None:
    with forward_ad.dual_level(), count("GraphCut") as cuts:
        x = forward_ad.make_dual(grid("lazy", 4), grid("lazy", 4))
        tangent = forward_ad.unpack_dual(x.sin() * x).tangent
    assert cuts() == 0
    assert isinstance(tangent, lazy_backend.LazyTensor)


@program
def autograd_functional(device: str, sync: Sync):
    x = grid(device, 3) + 1
    made = [torch.autograd.functional.jacobian(lambda x: x.outer(x).sin().sum(0), x)]
    made += torch.autograd.functional.vjp(lambda x: x.sin(), x, grid(device, 3))
    made += torch.autograd.functional.jvp(lambda x: x.sin(), x, grid(device, 3))
    sync()
    made += torch.autograd.functional.vhp(wave, x, grid(device, 3))
    made += torch.autograd.functional.hvp(wave, x, grid(device, 3))
    return [*made, torch.autograd.functional.hessian(wave, x)]


# ----- torch.autograd.Function


class Product(torch.autograd.Function):
    """Leaves gradients that nobody asked for undefined."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        ctx.set_materialize_grads(False)
        return x * y, x + y

    @staticmethod
    def backward(ctx, product, total):
        x, y = ctx.saved_tensors
        assert total is None
        return product * y, product * x


class Exp(torch.autograd.Function):
    """With `setup_context`, forward mode and a generated vmap rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0]


class Twice(torch.autograd.Function):
    """With a vmap rule of its own."""

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

    @staticmethod
    def vmap(info, dims, x):
        return Twice.apply(x) + 0, dims[0]


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * 2


class Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        return x.sort()[0], order

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Square(torch.autograd.Function):
    """Returns a view of its operand."""

    @staticmethod
    def forward(ctx, x):
        return x.view(2, 2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(4) * 3


@program
def a_function_of_two_results(device: str, sync: Sync):
    x, y = leaf(device, 4), leaf(device, 4)
    product, _ = Product.apply(x, y)
    sync()
    product.sum().backward()
    return x.grad, y.grad


@program
def a_function_with_a_context(device: str, sync: Sync):
    mapped = vmap(grad(lambda x: Exp.apply(x).sum()))(grid(device, 3, 4))
    sync()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grid(device, 3), grid(device, 3))
        return mapped, forward_ad.unpack_dual(Exp.apply(dual)).tangent


@program
def a_function_with_a_vmap_rule(device: str, sync: Sync):
    return (vmap(Twice.apply)(grid(device, 3, 4)),)


@program
def a_function_that_writes_a_view(device: str, sync: Sync):
    x = leaf(device, 4)
    y = x * 1
    z = DoubledInPlace.apply(y[1:3])
    sync()
    (y.sum() + z.sum()).backward()
    return x.grad, y


@program
def a_function_with_an_int_result(device: str, sync: Sync):
    x = leaf(device, 4)
    values, order = Sorted.apply(x)
    sync()
    values.sum().backward()
    return x.grad, order


@program
def a_function_that_returns_its_operand(device: str, sync: Sync):
    x = leaf(device, 4)
    y = Identity.apply(x)
    y.sum().backward()
    return x.grad, y is x, y


@program
def a_function_that_returns_a_view(device: str, sync: Sync):
    x = leaf(device, 4)
    y = x * 1
    z = Square.apply(y)
    sync()
    z.sum().backward()
    return x.grad, y


# ----- hooks


def linear(device: str) -> nn.Linear:
    model = nn.Linear(3, 2, bias=False)
    model.weight.data.fill_(0.5)
    return model.to(device)


@program
def hooks_of_a_module(device: str, sync: Sync):
    model, x = linear(device), leaf(device, 4, 3)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.register_forward_hook(lambda module, args, output: output + 1)
    model.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 3,))
    model.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 5,))
    out = model(x)
    sync()
    out.sum().backward()
    return x.grad, model.weight.grad


@program
def hooks_of_a_node(device: str, sync: Sync):
    x = leaf(device, 4)
    y = x.sin()
    y.grad_fn.register_hook(lambda inner, outer: (inner[0] * 2,))
    y.grad_fn.register_prehook(lambda outer: (outer[0] * 3,))
    y.sum().backward()
    return (x.grad,)


@program
def a_hook_of_many_gradients(device: str, sync: Sync):
    x, y, seen = leaf(device, 4), leaf(device, 4), []
    torch.autograd.graph.register_multi_grad_hook((x, y), lambda gradients: seen.extend(g + 0 for g in gradients))
    (x * y).sum().backward()
    return seen


@program
def an_optimizer_in_the_backward(device: str, sync: Sync):
    model = linear(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def update(parameter):
        optimizer.step()
        optimizer.zero_grad()

    model.weight.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        model(grid(device, 4, 3)).square().sum().backward()
        sync()
    return (model.weight,)


@program
def saved_tensors_through_hooks(device: str, sync: Sync):
    x = leaf(device, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone() * 2, lambda t: t / 2):
        y = x.sin().exp()
    sync()
    y.sum().backward()
    return (x.grad,)


@program
def saved_tensors_on_the_cpu(device: str, sync: Sync):
    x = leaf(device, 4)
    with torch.autograd.graph.save_on_cpu():
        y = (x.sin() * x).exp()
    sync()
    y.sum().backward()
    return (x.grad,)


# ----- checkpoints


@program
def a_selective_checkpoint(device: str, sync: Sync):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    x = leaf(device, 4, 4)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(lambda x: (x @ x).sin().exp(), x, use_reentrant=False, context_fn=contexts)
    sync()
    y.sum().backward()
    return (x.grad,)


@program
def a_checkpointed_sequence(device: str, sync: Sync):
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]).to(device), leaf(device, 2, 3)
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    return x.grad, model[0].weight.grad


@program
def a_checkpoint_differentiated_twice(device: str, sync: Sync):
    x = leaf(device, 4)
    y = checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    sync()
    first.sum().backward()
    return first, x.grad


# ----- higher orders


@program
def unrolled_optimization(device: str, sync: Sync):
    start, rate = leaf(device, 3), torch.tensor(0.1).to(device).requires_grad_()
    parameter = start
    for _ in range(3):
        (gradient,) = torch.autograd.grad((parameter**3).sum(), parameter, create_graph=True)
        parameter = parameter - rate * gradient
        sync()
    parameter.sum().backward()
    return start.grad, rate.grad


@program
def a_differentiable_optimizer(device: str, sync: Sync):
    x, start = leaf(device, 3), nn.Parameter(grid(device, 3))
    weight = start.clone()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, differentiable=True)
    (weight.grad,) = torch.autograd.grad((weight * x * weight).sum(), weight, create_graph=True)
    optimizer.step()
    sync()
    weight.sum().backward()
    return x.grad, start.grad


@program
def a_gradient_penalty(device: str, sync: Sync):
    weight = nn.Parameter(grid(device, 3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (weight**3).sum()
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()
        sync()
    return (weight,)


@program
def batched_gradients(device: str, sync: Sync):
    x = leaf(device, 3)
    return torch.autograd.grad(x.sin(), x, torch.eye(3).to(device), is_grads_batched=True)


@program
def gradients_that_are_not_there(device: str, sync: Sync):
    x, y = leaf(device, 4), leaf(device, 4)
    first = torch.autograd.grad(x.sum(), [x, y], allow_unused=True)
    return [*first[:1], first[1] is None, *torch.autograd.grad(x.sum(), [x, y], materialize_grads=True)]


@program
def gradients_of_chosen_leaves(device: str, sync: Sync):
    x, y = leaf(device, 4), leaf(device, 4)
    (x * y).sum().backward(inputs=[x])
    return x.grad, y.grad is None


@program
def complex_writes(device: str, sync: Sync):
    z = complex_grid(device).requires_grad_()
    y = z * 1
    y.real.mul_(2)
    y.imag[1:] = 3
    torch.view_as_real(y)[0] += 1
    sync()
    y.abs().sum().backward()
    return y, z.grad


@program
def complex_functions(device: str, sync: Sync):
    z = complex_grid(device).requires_grad_()
    y = (z.conj() * z).abs().sum() + torch.view_as_real(z).square().sum() + z.angle().sum() + (z.conj().imag * 2).sum()
    sync()
    y.backward()
    return (z.grad,)


@program
def a_conjugated_view_written(device: str, sync: Sync):
    z = complex_grid(device)
    part, whole = z.conj().imag, z.conj()
    z.fill_(2 - 1j)
    sync()
    part.mul_(2)
    return z, part, whole, whole.real, whole * 1


@program
def data_swapped_across_conjugate_bits(device: str, sync: Sync):
    z = complex_grid(device)
    part, whole, plain = z.conj().imag, z.conj(), z.clone()
    part.data = grid(device, 3)
    whole.data = grid(device, 4)
    plain.data = z.conj()
    sync()
    plain.mul_(2)
    taken = z.clone()
    taken.set_(z.conj())  # takes the memory, not the bit
    return z, part, whole, plain, taken


@program
def parametrized(device: str, sync: Sync):
    model = nn.Linear(3, 3)
    model.weight.data = torch.arange(9.0).view(3, 3) / 9
    model.bias.data.zero_()
    nn.utils.parametrizations.weight_norm(model)
    model = model.to(device)
    out = model(grid(device, 2, 3))
    sync()
    out.sum().backward()
    return out, model.parametrizations.weight.original0.grad


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("make_sync", [NoSync, SyncAt])
def test_like_eager(name: str, make_sync: type) -> None:
    assert_like_eager(PROGRAMS[name], make_sync())


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_like_eager(name: str) -> None:
    config.backend = "aot_eager"
    for _ in range(3):
        assert_like_eager(PROGRAMS[name], NoSync())
    assert metrics.counter_value("CompileFailed") == 0


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"saved_tensors_on_the_cpu"}))
def test_nothing_but_the_end_is_read(name: str) -> None:
    with lazy_backend.strict():
        PROGRAMS[name]("lazy", NoSync())


# ----- gradcheck


@pytest.mark.parametrize("function", [torch.tanh, lambda x: x @ x.t(), lambda x: x.softmax(0), lambda x: x.cumprod(0)])
def test_gradients_of_every_kind_check(function) -> None:
    x = (leaf("lazy", 2, 3, dtype=torch.float64) + 0.1).detach().requires_grad_()
    assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradcheck(function, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, x)


# ----- errors and version counters


def error_of(function, device: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        function(device)
    # PyTorch's C++ prints a type's name, which is its own for each device
    return str(caught.value).split("\n")[0].replace("LazyFloatType", "torch.FloatTensor")


def saved_then(write):
    """An operand that autograd saved is written: eager refuses the backward."""

    def run(device: str) -> None:
        x = leaf(device, 4)
        a = x * 1
        y = a.exp() * a
        with torch.no_grad():
            write(a)
        y.sum().backward()

    return run


def once_differentiable_twice(device: str) -> None:
    x = leaf(device, 4)
    (gradient,) = torch.autograd.grad((OnceOnly.apply(x) ** 2).sum(), x, create_graph=True)
    gradient.sum().backward()


def view_of_no_grad_written(device: str) -> None:
    x = leaf(device, 4)
    with torch.no_grad():
        view = x[1:]
    view.add_(1)


def bad_gradient(device: str) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        (leaf(device, 4) * 0 - 1).sqrt().sum().backward()


def inference_tensor(use):
    def run(device: str) -> None:
        with torch.inference_mode():
            x = grid(device, 4) + 1
        use(x)

    return run


def if_of_a_batch(device: str) -> None:
    vmap(lambda row: row if row.sum() > 0 else -row)(grid(device, 4, 3))


ERRORS = {
    "saved_then_added": saved_then(lambda a: a.add_(1)),
    "saved_then_written_through_a_view": saved_then(lambda a: a[0].fill_(2)),
    "saved_then_foreach": saved_then(lambda a: torch._foreach_mul_([a], 2.0)),
    "saved_then_out": saved_then(lambda a: torch.mul(a, 2, out=a)),
    "saved_then_copied_into": saved_then(lambda a: a.copy_(a * 2)),
    "saved_then_set_item": saved_then(lambda a: a.__setitem__(0, 1.0)),
    "once_differentiable_twice": once_differentiable_twice,
    "view_of_no_grad_written": view_of_no_grad_written,
    "a_function_writes_a_leaf": lambda device: DoubledInPlace.apply(leaf(device, 4)),
    "foreach_on_a_leaf": lambda device: torch._foreach_add_([leaf(device, 4)], 1.0),
    "out_that_requires_grad": lambda device: torch.add(leaf(device, 4), 1, out=torch.empty(4, device=device)),
    "one_of_many_views_written": lambda device: (leaf(device, 4) * 1).split(2)[0].add_(1),
    "one_of_unbound_views_written": lambda device: (leaf(device, 4) * 1).unbind()[0].add_(1),
    "expanded_written": lambda device: grid(device, 4).expand(2, 4).add_(1),
    "a_detached_view": lambda device: (leaf(device, 4) * 2)[1:].detach_(),
    "unused": lambda device: torch.autograd.grad(leaf(device, 4).sum(), [leaf(device, 4)]),
    "a_gradient_of_another_shape": lambda device: leaf(device, 4).sum().backward(grid(device, 2)),
    "several_without_seeds": lambda device: torch.autograd.backward([leaf(device, 4).sum(), leaf(device, 4) * 2]),
    "a_hook_on_nothing": lambda device: grid(device, 4).register_hook(lambda gradient: gradient),
    "requires_grad_of_a_result": lambda device: (leaf(device, 4) * 2).requires_grad_(False),
    "a_grad_of_another_shape": lambda device: setattr(leaf(device, 4), "grad", grid(device, 3)),
    "item_under_vmap": lambda device: vmap(lambda row: row.sum().item())(grid(device, 4, 3)),
    "if_under_vmap": if_of_a_batch,
    "an_inference_tensor_written": inference_tensor(lambda x: x.add_(1)),
    "an_inference_tensor_saved": inference_tensor(lambda x: x * leaf("cpu", 4).to(x.device)),
    "an_inference_tensor_tracked": inference_tensor(lambda x: x.requires_grad_()),
    "an_inference_tensors_version": inference_tensor(lambda x: x._version),
    "an_inference_tensors_view_written": inference_tensor(lambda x: x[1:].add_(1)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_like_eagers(name: str) -> None:
    assert error_of(ERRORS[name], "lazy") == error_of(ERRORS[name], "cpu")


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_finds_a_nan() -> None:
    assert error_of(bad_gradient, "lazy") == error_of(bad_gradient, "cpu")


WRITES = {
    "add": lambda x: x.add_(1),
    "view": lambda x: x[1:].mul_(2),
    "data": lambda x: x.data.add_(1),
    "detach": lambda x: x.detach().add_(1),
    "copy": lambda x: x.copy_(x * 2),
    "out": lambda x: torch.add(x, 1, out=x),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "foreach_copy": lambda x: torch._foreach_copy_([x], [x + 1]),
    "foreach_of_views": lambda x: torch._foreach_mul_([x[:1], x[1:]], [1.0, 2.0]),
    "set_item": lambda x: x.__setitem__(0, 1.0),
    "mask": lambda x: x.__setitem__(x > 1, 1.0),
    "transpose": lambda x: x.t_(),
    "squeeze": lambda x: x.squeeze_(),
    "set": lambda x: x.set_(x.clone()),
    "requires_grad": lambda x: x.requires_grad_(),
    "detach_in_place": lambda x: x.detach_(),
    "random": lambda x: x.normal_(),
    "init": lambda x: nn.init.ones_(x),
    "resize": lambda x: x.resize_(4),
    "data_of_another": lambda x: setattr(x, "data", x.clone()),
    "flattened": lambda x: x.view(-1).relu_(),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_a_write_counts_as_in_eager(name: str) -> None:
    def versions(device: str) -> list[int]:
        x = grid(device, 4)
        view = x[1:]
        WRITES[name](x)
        return [x._version, view._version]

    assert versions("lazy") == versions("cpu")


# ----- inference mode


def test_what_is_an_inference_tensor() -> None:
    def flags(device: str) -> list[bool]:
        outside = leaf(device, 4)
        with torch.inference_mode():
            made, view, inside = outside * 2, outside[1:], grid(device, 4)
            with torch.inference_mode(False):
                tracked = outside * 3
        tensors = [made, view, inside, inside.view(2, 2), tracked, outside]
        return [t.is_inference() for t in tensors] + [t.requires_grad for t in tensors]

    assert flags("lazy") == flags("cpu")


@pytest.mark.parametrize("where", ["always", "never"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tensors_made_in_inference_mode_can_be_written(where: str, backend: str) -> None:
    config.run_in_background, config.backend = where, backend
    for _ in range(3):
        with torch.inference_mode():
            x, norm = grid("lazy", 4), nn.BatchNorm1d(3).to("lazy")
            norm(grid("lazy", 2, 3))
            x.add_(1)
        lazy_backend.mark_step(wait=True)
        with torch.inference_mode():
            x.mul_(2)
            norm(grid("lazy", 2, 3))
        lazy_backend.mark_step(wait=True)
        assert x.tolist() == [2.0, 4.0, 6.0, 8.0]
        assert norm.num_batches_tracked.item() == 2


def test_an_upload_of_an_inference_tensor_is_an_ordinary_tensor() -> None:
    with torch.inference_mode():
        source = grid("cpu", 4)
    x = source.to("lazy").add_(1).requires_grad_()
    (x * x).sum().backward()
    assert_same(x.grad, (torch.arange(4.0) + 1) * 2)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_a_whole_model_in_inference_mode_is_as_without_gradients(make) -> None:
    torch.manual_seed(0)
    model = make(4, 4, 2, dropout=0.5).to("lazy")

    def run(mode) -> torch.Tensor:
        torch.manual_seed(1)
        with mode():
            return model(grid("lazy", 3, 2, 4))[0].clone()

    assert_same(run(torch.inference_mode), run(torch.no_grad).cpu())


# ----- where values are read within a dispatch


@pytest.mark.parametrize("where", ["always", "never"])
@pytest.mark.parametrize(
    "read",
    [
        lambda w: (w * 1).tolist(),
        lambda w: w[0].item(),
        lambda w: w[w.abs() > 2].cpu(),
        lambda w: torch.equal(w, w.clone()),
        lambda w: (w.imag * 1).tolist(),
        lambda w: w.imag[2].item(),
        lambda w: torch.nonzero(w.imag - 1).cpu(),
        lambda w: w.imag.masked_select(w.real > 1).cpu(),
        lambda w: torch.bincount((w.real.long() + w.imag.long()).clamp(0)).cpu(),
    ],
)
def test_a_read_sees_conjugate_and_negative_bits(where: str, read) -> None:
    config.run_in_background = where
    w = complex_grid("lazy").conj()
    lazy_backend.mark_step(wait=True)
    assert_same(read(w), read(complex_grid("cpu").conj()))


# ----- threads, profilers, saved tensors


def test_threads_accumulate_into_one_gradient() -> None:
    weight = leaf("lazy", 4)
    threads = [threading.Thread(target=lambda i=i: (weight.sin() * i).sum().backward()) for i in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(weight.grad.cpu(), weight.detach().cpu().cos() * 6)


def test_gradients_accumulate_across_steps_in_place() -> None:
    weight = leaf("lazy", 4)
    weight.sum().backward()
    first = weight.grad
    lazy_backend.mark_step()
    (weight * 2).sum().backward()
    lazy_backend.mark_step()
    assert weight.grad is first
    assert first.tolist() == [3.0] * 4


def test_a_profiler_sees_recording() -> None:
    options = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    with torch.profiler.profile(**options) as profile, torch.profiler.record_function("step"):
        (leaf("lazy", 4) * 2).sum().backward()
        lazy_backend.mark_step(wait=True)
    assert any(event.key == "step" for event in profile.key_averages())


def test_the_old_profiler_works() -> None:
    with torch.autograd.profiler.profile() as profile:
        (leaf("lazy", 4) * 2).sum().backward()
    assert "aten::mul" in {event.key for event in profile.key_averages()}


def test_linearize_says_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match="call the function"):
        torch.func.linearize(torch.sin, grid("lazy", 3))
