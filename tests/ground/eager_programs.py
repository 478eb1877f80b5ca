"""Short eager programs, each of another part of PyTorch, without a lazy tensor in them.

In: nothing; `programs` has them by name, in the order in which they are to run: those that fork come first, before
anything starts threads. Out: what each computes, as tensors and plain values, the same in every process.
`observe.py` runs them and writes down what they did.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Program = Callable[[], Any]
programs: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Adds a function to `programs`."""
    programs[function.__name__] = function
    return function


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def from_child(task: Callable[[], Any]) -> Any:
    """The value that the task returns in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            message = pickle.dumps(task())
        except BaseException as error:
            message = pickle.dumps(f"{type(error).__name__}: {error}")
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(message)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(message)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# ----- processes


def _ddp_rank(rank: int, folder: str) -> Any:
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    timeout = datetime.timedelta(seconds=50)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        inputs = torch.arange(12.0).reshape(3, 4) + rank + step
        with model.no_sync() if step == 1 else contextlib.nullcontext():
            loss = model(inputs).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total)
    torch.distributed.broadcast(inputs, 1)
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    torch.distributed.destroy_process_group()
    return losses, state, gradients_as_lists(model), total.item(), inputs.tolist()


def gradients_as_lists(module: nn.Module) -> list[Any]:
    return [None if grad is None else grad.tolist() for grad in gradients(module)]


@program
def data_parallel_in_two_processes() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                message = pickle.dumps(_ddp_rank(1, folder))
            except BaseException as error:
                message = pickle.dumps(f"{type(error).__name__}: {error}")
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(message)
            os._exit(0)
        os.close(writer)
        first = _ddp_rank(0, folder)
        with os.fdopen(reader, "rb") as pipe:
            second = pickle.loads(pipe.read())
        os.waitpid(child, 0)
    return first, second


class _Squares(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((2,), float(index)), "y": index**2, "name": str(index)}


@program
def loader_with_workers() -> Any:
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(_Squares(), batch_size=4, num_workers=2, shuffle=True, generator=generator)
    return [(batch["x"], batch["y"], batch["name"]) for batch in loader]


def _in_fork() -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = torch.ones(3, 3) @ torch.full((3, 3), 0.1)
    weight = torch.ones(2, requires_grad=True)
    weight.pow(3).sum().backward()
    assert weight.grad is not None
    return product.float().tolist(), weight.grad.tolist(), torch.rand(2).tolist(), sorted(warnings.filters[0][:1])


@program
def os_fork() -> Any:
    torch.manual_seed(5)
    return from_child(_in_fork), torch.rand(2)


def _put(queue: Any) -> None:
    queue.put(_in_fork())


@program
def multiprocessing_fork() -> Any:
    torch.manual_seed(6)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_put, args=(queue,))
    process.start()
    found = queue.get(timeout=60)
    process.join()
    tensors = torch.multiprocessing.get_context("fork").SimpleQueue()
    shared = torch.zeros(3).share_memory_()
    child = os.fork()
    if child == 0:
        shared += 2
        os._exit(0)
    os.waitpid(child, 0)
    tensors.close()
    return found, process.exitcode, shared


@program
def uncaught_exception() -> Any:
    """What a program prints that ends with an error: through `sys.excepthook`."""

    def fail() -> str:
        sys.stderr = io.StringIO()
        try:
            torch.ones(2) @ torch.ones(3)
        except RuntimeError:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return sys.stderr.getvalue()

    return from_child(fail)


# ----- mixed precision


@program
def autocast_bf16() -> Any:
    model, inputs = net(), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(inputs)
        loss = functional.mse_loss(outputs.float(), torch.ones(3, 2))
    loss.backward()
    with torch.amp.autocast("cpu"):
        others = (
            model(inputs) @ torch.ones(2, 2),
            torch.softmax(outputs, 1),
            outputs.sum(),
            torch.is_autocast_enabled("cpu"),
        )
    return outputs, loss, gradients(model), others


@program
def autocast_nested_and_disabled() -> Any:
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    dtypes = []
    with torch.autocast("cpu", dtype=torch.float16):
        dtypes.append((a @ b).dtype)
        with torch.autocast("cpu", enabled=False):
            dtypes.append((a @ b).dtype)
            with torch.autocast("cpu"):
                dtypes.append((torch.get_autocast_dtype("cpu"), (a @ b).dtype))
        dtypes.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()))
        with torch.autocast("cuda", enabled=False):
            dtypes.append((a @ b).dtype)
    with torch.autocast("cpu", dtype=torch.float64):
        dtypes.append((a @ b).dtype)
    try:
        torch.autocast("nonsense")
    except RuntimeError as error:
        dtypes.append(str(error))
    dtypes.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cuda")))
    return dtypes


@program
def autocast_cache() -> Any:
    weight = torch.randn(3, 3, requires_grad=True)
    names = []
    for cached in (True, False):
        with torch.autocast("cpu", cache_enabled=cached):
            names.append(torch.is_autocast_cache_enabled())
            first, second = weight @ torch.ones(3, 3), weight @ torch.ones(3, 3)
            with torch.no_grad():
                names.append((weight @ torch.eye(3)).requires_grad)
        casts = [one.grad_fn.next_functions[0][0] for one in (first, second)]  # type: ignore[union-attr]
        names.append((casts[0] is casts[1], casts[0].name()))
        (first + second).sum().backward()
    decorated = torch.autocast("cpu")(lambda x: x @ x)
    return names, weight.grad, decorated(weight), torch.amp.is_autocast_available("cpu")


class _Scaled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


@program
def custom_functions_under_autocast() -> Any:
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu"):
        found = _Scaled.apply(x.bfloat16(), weight)
        (found * (x @ weight)).sum().backward()
    return found, x.grad, weight.grad


@program
def grad_scaler() -> Any:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).sum() * (float("inf") if step == 2 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), norm))
    return scales, model.state_dict(), scaler.state_dict(), torch.amp.GradScaler("cpu", enabled=False).is_enabled()


# ----- the compiler


@program
def compile_inductor() -> Any:
    @torch.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2 + 1).relu()

    return step(torch.randn(8))


@program
def compile_aot_eager() -> Any:
    model = torch.compile(net(), backend="aot_eager")
    inputs = torch.randn(3, 4)
    with torch.autocast("cpu"):
        loss = model(inputs).float().square().mean()
    loss.backward()

    @torch.compile(backend="eager", dynamic=True)
    def branching(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.sum() > 0:
            return y + torch.norm(y)
        with torch.autocast("cpu"):
            return y @ y

    explained = torch._dynamo.explain(lambda x: x.cos() + 1)(inputs)
    return loss, gradients(model), branching(torch.ones(3, 3)), branching(-torch.ones(4, 4)), explained.graph_count


# ----- copies, files, batches


@program
def collate() -> Any:
    batch = [{"x": torch.full((2,), float(i)), "y": (i, [0.5, i]), "z": f"{i}"} for i in range(3)]
    default = torch.utils.data.default_collate(batch)
    sparse = torch.utils.data.default_convert([torch.ones(1), 3, "text"])
    try:
        torch.utils.data.default_collate([torch.ones(2), torch.ones(3)])
    except RuntimeError as error:
        return default, sparse, str(error)
    return None


@program
def deep_copies() -> Any:
    model = net()
    model[0].weight.requires_grad_(False)
    copied = copy.deepcopy(model)
    tensor = torch.randn(3, 2).t()
    tensor.extra = {"of": "mine"}  # type: ignore[attr-defined]
    again = copy.deepcopy([tensor, tensor[0], torch.Generator().manual_seed(2).initial_seed()])
    shared = copy.deepcopy({"a": copied, "b": copied[0].weight})
    try:
        copy.deepcopy(torch.ones(2, requires_grad=True) * 2)
    except RuntimeError as error:
        refused = str(error)
    return copied.state_dict(), again, again[0].extra, shared["a"][0].weight is shared["b"], copy.copy(tensor), refused


@program
def saved_and_loaded() -> Any:
    saved = {"model": net().state_dict(), "view": torch.arange(12.0)[2:5], "list": [1, 2.5, "three"]}
    found = []
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        file = io.BytesIO()
        torch.save(saved, file, **options)  # type: ignore[arg-type]
        for where in (None, "cpu", "meta", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, place: storage):
            file.seek(0)
            loaded = torch.load(file, map_location=where)
            found.append({name: (value.device.type, value) for name, value in loaded["model"].items()})
            found.append(loaded["view"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "saved.pt")
        torch.save(saved, path)
        found.append(torch.load(path, mmap=True)["view"].clone())
        torch.save(nn.Linear(2, 2), path)
        try:
            torch.load(path)
        except pickle.UnpicklingError as error:
            found.append(str(error).splitlines()[0])
        found.append(torch.load(path, weights_only=False).state_dict())
    with torch.serialization.skip_data(), torch.device("meta"):
        found.append(pickle.loads(pickle.dumps(torch.ones(2))).device.type)
    return found


@program
def storages_and_dlpack() -> Any:
    x = torch.arange(6.0).reshape(2, 3)
    shared = torch.from_dlpack(x)
    shared[0] = 9
    capsule = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    array = torch.from_numpy(x.numpy())
    array += 1
    try:
        x.clone().requires_grad_().__dlpack__()
    except BufferError as error:
        return x, capsule, x.__dlpack_device__(), str(error), x.untyped_storage().nbytes()
    return None


# ----- training


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {"centered": True},
    "NAdam": {},
    "RAdam": {},
    "Adadelta": {},
    "Adamax": {},
    "Rprop": {},
    "ASGD": {},
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def _trained(name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    model = net()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


@program
def optimizers() -> Any:
    found = []
    for name, options in OPTIMIZERS.items():
        found += [_trained(name, **options), _trained(name, **options, foreach=True)]
        found += [_trained(name, **options, fused=True)] if name in FUSED else []
    for options in ({"capturable": True}, {"fused": True, "foreach": True}, {"lr": torch.tensor(0.1), "foreach": True}):
        try:
            optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], **options)
            optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
            optimizer.step()
            found.append("done")
        except (AssertionError, RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {str(error).split('[')[0]}")  # without the devices that there are
    lbfgs = torch.optim.LBFGS(parameters := [nn.Parameter(torch.ones(2))], max_iter=3)
    lbfgs.step(lambda: (loss := parameters[0].square().sum(), loss.backward())[0])  # type: ignore[func-returns-value]
    return found, parameters


@program
def schedules_and_averages() -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    moving = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    rates = []
    schedule.step()  # before the optimizer: PyTorch warns
    hook = optimizer.register_step_pre_hook(lambda *unused: rates.append("step"))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        schedule.step()
        warmup.step()
        averaged.update_parameters(model)
        moving.update_parameters(model)
        rates.append(schedule.get_last_lr())
    hook.remove()
    return rates, averaged.state_dict(), moving.state_dict(), pickle.loads(pickle.dumps(optimizer)).state_dict()


@program
def checkpointed() -> Any:
    found = []
    for reentrant in (True, False):
        torch.manual_seed(2)
        model, x = nn.Sequential(net(), nn.Dropout(0.5)), torch.randn(3, 4, requires_grad=True)
        with torch.autocast("cpu", enabled=not reentrant):
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        y.sum().backward()
        found.append((y, x.grad, gradients(model)))
    x = torch.randn(2, 4, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint_sequential(net(), 2, x, use_reentrant=False)
    y.sum().backward()
    with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True):
        (x.exp().sum() * 2).backward()
    return found, y, x.grad


# ----- modules


@program
def module_hooks() -> Any:
    model, seen = net(), []
    handles = [
        model.register_forward_pre_hook(lambda module, args: seen.append("pre")),
        model.register_forward_hook(lambda module, args, output: output * 2),
        model[0].register_full_backward_hook(lambda module, grads, outs: seen.append([one is None for one in grads])),
        model[1].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 3,)),
        model[0].weight.register_hook(lambda grad: grad + 1),
        model[0].bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(tuple(parameter.grad.shape))),
        model.register_state_dict_post_hook(lambda module, state, prefix, metadata: seen.append(sorted(state))),
    ]
    y = model(torch.ones(2, 4))
    y.sum().backward()
    model.load_state_dict(model.state_dict(), assign=True)
    for handle in handles:
        handle.remove()
    return y, gradients(model), seen, model(torch.ones(2, 4))


@program
def global_hooks() -> Any:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen: list[Any] = []
    modules = torch.nn.modules.module
    handles = [
        modules.register_module_forward_pre_hook(lambda module, args: seen.append(type(module).__name__)),
        modules.register_module_forward_hook(lambda module, args, output: seen.append(tuple(output.shape))),
        modules.register_module_parameter_registration_hook(lambda module, name, value: seen.append(name)),
        register_optimizer_step_post_hook(lambda *unused: seen.append("step")),
    ]
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    return seen, model.state_dict()


@program
def weight_norms() -> Any:
    old = nn.utils.weight_norm(nn.Linear(3, 2))  # deprecated: PyTorch warns
    new = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    x = torch.ones(2, 3)
    y = old(x) + new(x) + spectral(x)
    y.sum().backward()
    moved = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)).double()
    nn.utils.remove_weight_norm(old)
    nn.utils.parametrize.remove_parametrizations(new, "weight")
    return y, gradients(old), gradients(new), new.state_dict(), moved.weight.dtype, copy.deepcopy(spectral).state_dict()


@program
def modules_moved() -> Any:
    model = net()
    before = [id(parameter) for parameter in model.parameters()]
    model.half()
    kept = [id(parameter) == one for parameter, one in zip(model.parameters(), before, strict=True)]
    halves = [(value.dtype, value.clone()) for value in model.state_dict().values()]
    model.to(torch.float64, memory_format=torch.contiguous_format)
    first, second = torch.ones(2), torch.zeros(3)
    torch.utils.swap_tensors(first, second)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        other = net().to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    empty = nn.Linear(2, 3, device="meta").to_empty(device="cpu")
    try:
        nn.Linear(2, 2, device="meta").to("cpu")
    except NotImplementedError as error:
        refused = str(error)
    return kept, halves, model.state_dict(), first, second, other.state_dict(), empty.weight.shape, refused


@program
def lazy_modules() -> Any:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    text = repr(model), repr(model[0].weight)
    try:
        model[0].weight.shape  # noqa: B018 -- the error is what is asked for
    except RuntimeError as error:
        text += (str(error),)
    moved = nn.LazyConv2d(3, 1).to(torch.float32)
    y = model(torch.randn(4, 5))
    parameter = nn.parameter.UninitializedParameter()
    parameter.materialize((2, 2))
    return text, y, repr(model), type(moved.weight).__name__, type(model[0].weight).__name__, parameter.shape


@program
def transformer_with_padding() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 3, 8, norm_first=True), 1)  # PyTorch warns
    x = torch.randn(3, 5, 8)
    padding = torch.arange(5).expand(3, 5) > torch.tensor([[2], [4], [3]])
    with torch.no_grad():
        nested = encoder(x, src_key_padding_mask=padding)
    plain = encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(5), is_causal=True)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, key_padding_mask=padding)
    scaled = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    return nested, plain, attention, scaled


@program
def recurrent_nets() -> Any:
    found = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        net_, x = kind(3, 4, 2, batch_first=True, bidirectional=True), torch.randn(2, 5, 3, requires_grad=True)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
        padded = nn.utils.rnn.pad_packed_sequence(net_(packed)[0], batch_first=True)
        (net_(x)[0].sum() + padded[0].sum()).backward()
        found.append((padded, x.grad, gradients(net_)))
    return found


# ----- functions


@program
def norms() -> Any:
    x = torch.randn(3, 4)
    orders: list[Any] = [2, 1, 0, float("inf"), -float("inf"), "fro", "nuc", 3.5]
    found = [torch.norm(x, order) for order in orders]
    found += [torch.norm(x, 2, dim=1, keepdim=True), x.norm(dim=0, dtype=torch.float64), torch.norm(x.half())]
    found += [
        torch.linalg.norm(x, ord=2),
        torch.linalg.vector_norm(x, 3),
        x.to_sparse().norm(),
        torch.norm(x, out=x[0, 0]),
    ]
    try:
        torch.norm(torch.ones(2, dtype=torch.int64))
    except RuntimeError as error:
        return found, str(error)
    return None


@program
def transforms() -> Any:
    from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

    x = torch.randn(3)
    model = net()
    state = dict(model.named_parameters())
    per_sample = vmap(grad(lambda state, one: functional_call(model, state, one).sum()), in_dims=(None, 0))
    return (
        grad(lambda one: one.sin().sum())(x),
        jacrev(torch.cos)(x),
        jacfwd(torch.cos)(x),
        jvp(torch.exp, (x,), (torch.ones(3),)),
        vjp(torch.tanh, x)[1](torch.ones(3)),
        vmap(lambda one: one @ one)(torch.randn(2, 3)),
        vmap(torch.norm)(torch.randn(2, 3)),
        per_sample(state, torch.randn(2, 4)),
        torch.func.hessian(lambda one: one.pow(3).sum())(x),
        torch.autograd.functional.jacobian(torch.sigmoid, x),
    )


@program
def profiled() -> Any:
    model = net()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as found:
        with torch.profiler.record_function("mine"):
            model(torch.ones(2, 4)).sum().backward()
        with torch.autocast("cpu"):
            model(torch.ones(2, 4))
    counted = {event.key: event.count for event in found.key_averages()}
    with torch.autograd.profiler.profile() as old:
        torch.ones(2) + 1
    return sorted(counted.items()), [event.name for event in old.function_events]


@program
def generators() -> Any:
    seeded, other = torch.Generator().manual_seed(4), torch.Generator("cpu")
    other.set_state(seeded.get_state())
    state = torch.get_rng_state()
    first = torch.randn(2, generator=seeded), torch.randperm(4, generator=other), torch.rand(2)
    torch.set_rng_state(state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        inner = torch.rand(2)
    try:
        torch.Generator("nonsense")
    except RuntimeError as error:
        refused = str(error).splitlines()[0]
    kinds = type(torch.Generator).__name__, isinstance(seeded, torch.Generator), seeded.device.type
    return first, inner, torch.rand(2), kinds, refused, torch.initial_seed(), seeded.clone_state().initial_seed()


@program
def default_dtypes() -> Any:
    found = []
    try:
        torch.set_default_dtype(torch.float64)
        found += [torch.ones(2).dtype, torch.tensor([0.5]).dtype, nn.Linear(1, 1).weight.dtype]
        torch.set_default_tensor_type(torch.FloatTensor)  # deprecated: PyTorch warns
        found.append(torch.get_default_dtype())
    finally:
        torch.set_default_dtype(torch.float32)
    torch.set_default_device("meta")
    found.append(torch.ones(2).device.type)
    torch.set_default_device(None)
    with torch.device("meta"):
        found.append(nn.Linear(1, 1).weight.device.type)
    try:
        torch.set_default_dtype(torch.int32)
    except TypeError as error:
        found.append(str(error))
    return found


@program
def sparse_tensors() -> Any:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    coo = dense.to_sparse().requires_grad_()
    csr = dense.to_sparse_csr()
    product = torch.sparse.mm(coo, torch.ones(2, 2))
    product.sum().backward()
    embedded = nn.Embedding(4, 2, sparse=True)
    embedded(torch.tensor([1, 1, 3])).sum().backward()
    torch.optim.SparseAdam(embedded.parameters()).step()
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    values = coo.grad.to_dense(), (csr @ torch.ones(2, 1)), (coo.detach() + coo.detach()).coalesce().values()
    return product, values, embedded.weight, (jagged * 2).values(), torch.sparse.softmax(coo.detach(), 1).to_dense()


# ----- parts of the dispatcher


@program
def custom_operators() -> Any:
    @torch.library.custom_op("ground::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @scaled.register_fake
    def _(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.empty_like(x)

    scaled.register_autograd(lambda ctx, grad: (grad * 2, None))
    scaled.register_autocast("cpu", torch.bfloat16)
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu"):
        cast = scaled(x, 3.0)
    scaled(x, 3.0).sum().backward()
    library = torch.library.Library("ground_two", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_autocast("ground_two::doubled", "cpu", torch.float16, lib=library)
    with torch.autocast("cpu"):
        found = torch.ops.ground_two.doubled(torch.ones(2))
    checked = torch.library.opcheck(scaled, (torch.ones(2), 1.5), raise_exception=False)
    return cast, x.grad, found, sorted(checked.items())


@program
def fake_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = torch.ones(3, 4)
        y = nn.Linear(4, 2)(x)
        converted = mode.from_tensor(nn.Parameter(torch.ones(2)))
        with torch.autocast("cpu"):
            product = x @ x.t()
        try:
            y.sum().item()
        except Exception as error:
            refused = type(error).__name__
        return repr(x), tuple(y.shape), repr(converted), product.dtype, refused, (x + 1).device.type


@program
def traced_graphs() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: torch.norm(x.sin() + 1).exp())(torch.ones(3))
    symbolic = make_fx(lambda x: x.view(-1).sum(), tracing_mode="symbolic")(torch.ones(2, 3))
    traced = torch.fx.symbolic_trace(net())
    exported = torch.export.export(net(), (torch.ones(2, 4),))
    codes = graph.code, symbolic.code, traced.code, [str(node.target) for node in exported.graph.nodes]
    return codes, graph(torch.ones(3)), exported.module()(torch.ones(2, 4))


@program
def functional_collectives() -> Any:
    from torch.distributed import _functional_collectives as collectives

    with one_process():
        x = torch.arange(4.0)
        group = torch.distributed.group.WORLD
        reduced = collectives.all_reduce(x, "sum", group).wait()
        gathered = collectives.all_gather_tensor(x, 0, group).wait()
        scattered = collectives.reduce_scatter_tensor(x, "sum", 0, group).wait()
        work = torch.distributed.all_reduce(x, async_op=True)
        work.wait()
        objects: list[Any] = [None]
        torch.distributed.all_gather_object(objects, {"a": 1})
        torch.distributed.barrier()
        name = torch.distributed.get_backend(), torch.distributed.get_world_size()
        return reduced, gathered, scattered, x, objects, name


@program
def sharded() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with one_process():
        mesh = init_device_mesh("cpu", (1,))
        model = net()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        local = [parameter.to_local().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]
        placed = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        product = (placed @ placed).redistribute(mesh, [Replicate()]).to_local()
        drawn = functional.dropout(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])).to_local()
        return losses, local, product, drawn


class _Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Named.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})

    calls: list[str] = []


class _Doubling(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@program
def subclasses_and_modes() -> Any:
    _Named.calls.clear()
    x = torch.ones(2, 2).as_subclass(_Named)
    y = torch.norm(x @ x + torch.ones(2, 2), dim=0)
    with torch.autocast("cpu"):
        cast = x @ x
    copied = copy.copy(x)
    kept = pickle.loads(pickle.dumps(torch.ones(2)))
    mode = _Doubling()
    with mode:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
        torch.norm(model(torch.ones(2, 4))).backward()
        optimizer.step()

    class Function(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            _Named.calls.append(f"mode {getattr(func, '__name__', func)}")
            return func(*args, **(kwargs or {}))

    with Function():
        torch.norm(torch.ones(2)) + 1
        torch.set_default_dtype(torch.float32)
    return type(y).__name__, type(cast).__name__, type(copied).__name__, kept, _Named.calls, mode.calls


# ----- manners


@program
def warnings_of_all_kinds() -> Any:
    x = torch.ones(2, 3, requires_grad=True)
    leaf = x * 2
    found = [leaf.grad]  # not of a leaf
    found.append(torch.tensor(torch.ones(2)))  # copies
    torch.ones(2).T.add_(torch.tensor([1.0, 2.0]))
    found += [torch.ones(2, 3, 4).mT.T]  # more than two dimensions
    out = torch.empty(1)
    torch.add(torch.ones(3), 1, out=out)  # resizes
    found.append(out)
    functional.mse_loss(torch.ones(2), torch.ones(2, 1))
    functional.softmax(torch.ones(2))
    nn.Dropout(0.5)(torch.ones(1))
    functional.l1_loss(torch.ones(2), torch.ones(2), reduce=True)
    torch.meshgrid(torch.ones(2), torch.ones(2))
    nn.LSTM(2, 2, dropout=0.1)
    torch.cuda.amp.GradScaler(enabled=False)
    torch.cuda.amp.autocast(enabled=False)
    torch.cpu.amp.autocast(enabled=False)
    torch.from_numpy(_read_only())
    torch.utils.data.DataLoader([1], num_workers=99)
    torch.autograd.backward(x.sum(), grad_tensors=torch.tensor(1.0), create_graph=True)
    torch.tensor([1, 2]).storage()
    torch.jit.annotate(int, 3)
    warnings.warn("mine", stacklevel=1)
    return [one for one in found if one is not None]


def _read_only() -> Any:
    array = torch.ones(2).numpy().copy()
    array.flags.writeable = False
    return array


@program
def error_texts() -> Any:
    def failing() -> Iterator[Callable[[], Any]]:
        yield lambda: torch.device("nonsense")
        yield lambda: torch.ones(2, device="cuda")
        yield lambda: torch.ones(2, device="xla")
        yield lambda: torch.ones(2).to("mtia")
        yield lambda: torch.ones(2) + torch.ones(3)
        yield lambda: nn.Linear(2, 3)(torch.ones(3))
        yield lambda: torch.ones(2, requires_grad=True).add_(1)
        yield lambda: torch.ones(2).backward()
        yield lambda: torch.nonsense
        yield lambda: torch.utils.nonsense
        yield lambda: torch.ops.aten.nonsense
        yield lambda: torch.get_device_module("nonsense")
        yield lambda: torch.optim.Adam([])
        yield lambda: torch.load(io.BytesIO(b"nonsense"))
        yield lambda: torch.distributed.all_reduce(torch.ones(1))
        yield lambda: torch.amp.GradScaler("nonsense")
        yield lambda: torch.compile(lambda x: x, backend="nonsense")(torch.ones(1))

    texts = []
    for call in failing():
        try:
            call()
            texts.append("no error")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
    return texts


@program
def facts() -> Any:
    """What PyTorch says of itself."""
    return (
        str(torch.accelerator.current_accelerator()),
        torch.cuda.is_available(),
        torch._C._get_privateuse1_backend_name(),
        sorted(name for name in dir(torch) if not name.lstrip("_").startswith("lazy")),
        [torch.amp.is_autocast_available(name) for name in ("cpu", "cuda", "mps", "xpu", "xla", "hpu")],
        [str(torch.get_device_module(name)) for name in ("cpu", "cuda", "meta") if hasattr(torch, name)],
        torch.get_num_threads() > 0,
        torch.are_deterministic_algorithms_enabled(),
        torch._dynamo.list_backends() == sorted(torch._dynamo.list_backends()),
    )


@program
def threads() -> Any:
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        weight = torch.full((2, 2), float(number), requires_grad=True)
        with torch.autocast("cpu", enabled=number % 2 == 1):
            product = weight @ weight
        product.float().sum().backward()
        found[number] = product, weight.grad, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()

    with torch.no_grad():
        others = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
    return [found[number] for number in sorted(found)]


@program
def scripted() -> Any:
    traced = torch.jit.trace(nn.Linear(2, 2).eval(), torch.ones(1, 2))
    return traced(torch.ones(1, 2)), [node.kind() for node in traced.inlined_graph.nodes()]


@dataclasses.dataclass(frozen=True)
class _Pair:
    left: torch.Tensor
    right: int


@program
def trees_and_futures() -> Any:
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten({"a": [torch.ones(1), 2], "b": (3,)})
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(4)
    x = torch.ones(2).requires_grad_()
    with torch.inference_mode():
        frozen = (x * 2).is_inference()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one * 2, lambda one: one):
        x.pow(2).sum().backward()
    return leaves, str(spec), future.value(), frozen, x.grad, dataclasses.replace(_Pair(x, 1), right=2).right
