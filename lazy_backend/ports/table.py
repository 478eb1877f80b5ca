"""The ports: one for each feature that needs internals of PyTorch or Python.

In: nothing. Out: `Port`s. Their features ask `fits()` before they reach or replace anything.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from lazy_backend.ports import autograd_engine, cpython, hooks, native_code, process_groups
from lazy_backend.ports.port import KnownSource, Port, Probe, ports

# ----- what is replaced, by subsystem (`replacements`)

LAZY_TENSOR_CORE = Port(
    "torch._lazy",
    "torch._C._lazy._mark_step",
    "torch._C._lazy._wait_device_ops",
    "torch._C._lazy._get_default_device_type",
    "torch._C._lazy_ts_backend._init",
    without="torch._lazy.mark_step() does nothing for lazy_backend: call lazy_backend.mark_step()",
)
FOREACH = Port(
    "foreach optimizers",
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices()",
    "torch.optim.optimizer._foreach_supported_types",
    "torch.optim.optimizer._get_foreach_kernels_supported_devices()",
    "torch.optim.swa_utils._get_foreach_kernels_supported_devices()",
    without="optimizers record a call for each parameter, which takes longer; foreach=True asks for one per list",
)
FUSED = Port(
    "fused optimizers",
    "torch.optim.optimizer._get_fused_kernels_supported_devices()",
    without="optimizers with fused=True refuse lazy parameters",
)
CAPTURABLE = Port(
    "capturable optimizers",
    "torch.optim.optimizer._get_capturable_supported_devices(supports_xla)",
    without="optimizers with capturable=True refuse lazy parameters",
)
GRAD_SCALER = Port(
    "gradient scaling without reads",
    "torch.amp.GradScaler._maybe_opt_step(self, optimizer, optimizer_state)",
    without="torch.amp.GradScaler reads at each step whether to skip it, which cuts the graph",
)
DEFAULT_DTYPE = Port(
    "changes of the default dtype",
    "torch.set_default_dtype(d)",
    "torch.set_default_tensor_type(t)",
    without="call mark_step() before torch.set_default_dtype: kernels look the dtype up when they run",
)
GENERATORS = Port(
    "generators",
    Probe("torch.Generator has a metaclass", lambda: type(torch.Generator) is not type),
    without='torch.Generator("lazy") raises; torch.manual_seed governs random numbers',
)
STREAMS = Port(
    "streams and events",
    "torch.Event",
    "torch.Stream",
    without='torch.Event("lazy") and torch.Stream("lazy") raise; torch.lazy.Event() and torch.lazy.Stream() work',
)
STRUCTURED_TRACE = Port(
    "structured traces",
    "torch._logging.trace_structured(name, metadata_fn)",
    without="lazy steps are not in TORCH_TRACE: config.log_file writes a log of them",
)
PROFILER_STEPS = Port(
    "steps of the profiler",
    "torch.profiler.profile.step(self)",
    "torch.profiler.profile.stop(self)",
    without="call lazy_backend.mark_step(wait=True) before profiler.step(): what is pending runs in a later step of it",
)
DLPACK = Port(
    "torch.utils.dlpack.to_dlpack",
    "torch.utils.dlpack.to_dlpack",
    without="export lazy tensors by torch.from_dlpack(tensor) or tensor.__dlpack__()",
)
NORMS = Port(
    "torch.norm",
    "torch.functional.norm(input, p, dim, keepdim, out, dtype)",
    "torch.norm",
    without="torch.norm of lazy tensors raises other errors than on the CPU; torch.linalg has all norms",
)
ENCODERS = Port(
    "padding in nn.TransformerEncoder",
    "torch.nn.TransformerEncoder.forward(self, src, mask, src_key_padding_mask, is_causal)",
    "torch._nested_tensor_from_mask_left_aligned",
    "torch.backends.mha.get_fastpath_enabled",
    without="nn.TransformerEncoder in evaluation leaves values in padded positions that are zeros on the CPU",
)
SCRIPTING = Port(
    "replaced operators in TorchScript",
    "torch.jit._builtins._find_builtin(fn)",
    "torch.jit._builtins._register_builtin(fn, op)",
    without="torch.jit.script refuses functions that ask whether autocast is on, as nn.MultiheadAttention does",
)
COLLATING = Port(
    "batches in workers",
    "torch.utils.data._utils.collate.default_collate_fn_map",
    without="a DataLoader's worker cannot collate lazy tensors: make them in the loop",
)
MOVING = Port(
    "moving modules",
    "torch.nn.Module._apply(self, fn, recurse)",
    "torch.utils.swap_tensors(t1, t2)",
    "torch._C._swap_tensor_impl",
    "torch.__future__.set_swap_module_params_on_conversion",
    "torch.nn.utils.parametrize._maybe_set(dest, src)",
    without="module.to(...) may make new parameters: make optimizers after it",
)
UNINITIALIZED = Port(
    "modules without a shape",
    "torch.nn.parameter.UninitializedParameter.__new__(cls, requires_grad, device, dtype)",
    "torch.nn.parameter.UninitializedBuffer.__new__(cls, requires_grad, device, dtype)",
    without="nn.LazyLinear and the like are to be made and run on the CPU before they move to the lazy device",
)
AUTOCAST = Port(
    "autocast",
    "torch.amp.autocast_mode.autocast.__enter__(self)",
    "torch.amp.autocast_mode.autocast.__exit__(self)",
    "torch.is_autocast_enabled",
    "torch.set_autocast_enabled",
    "torch.get_autocast_dtype",
    "torch.set_autocast_dtype",
    "torch.clear_autocast_cache",
    "torch._C._is_autocast_available",
    "torch._C.is_autocast_enabled",
    "torch._C.set_autocast_enabled",
    "torch._C.get_autocast_dtype",
    "torch._C.set_autocast_dtype",
    "torch._C.clear_autocast_cache",
    "torch._C._dispatch_tls_set_dispatch_key_included",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._dispatch_get_registrations_for_dispatch_key",
    "torch._C.DispatchKey.AutocastIPU",
    Probe(
        "no kernel of PyTorch on the key AutocastIPU",
        lambda: not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "AutocastIPU"),
    ),
    without='torch.autocast("lazy") raises, and lazy tensors are computed in the dtypes that they have',
)
CHECKPOINTS = Port(
    "autocast in torch.utils.checkpoint",
    "torch.utils.checkpoint._get_autocast_kwargs(device_type)",
    without="a checkpoint's second run may cast lazy tensors as blocks around its first run say for the CPU",
)
CASTS_OF_CUSTOM_FUNCTIONS = Port(
    "custom_fwd and custom_bwd",
    "torch.amp.autocast_mode.custom_fwd(fwd)",
    "torch.amp.autocast_mode.custom_bwd(bwd)",
    "torch.amp.custom_fwd",
    "torch.amp.custom_bwd",
    "torch.amp.autocast_mode._cast(value, device_type, dtype)",
    without="torch.amp.custom_fwd casts no lazy tensors unless its device_type is 'lazy'",
)
CASTS_OF_CUSTOM_OPERATORS = Port(
    "torch.library.register_autocast",
    "torch.library.register_autocast(op, device_type, cast_inputs)",
    "torch.library.CustomOpDef.register_autocast(self, device_type, cast_inputs)",
    "torch.library._cast",
    "torch._library.custom_ops._cast",
    "torch._library.custom_ops.OPDEFS",
    "torch._library.utils.lookup_op",
    without="custom operators cast no lazy tensors",
)
DYNAMO = Port(
    'torch.compile(backend="lazy")',
    "torch._subclasses.fake_tensor.FakeTensorConverter.from_real_tensor(self, fake_mode, t)",
    "torch._subclasses.fake_tensor.FakeTensorConverter._get_memo(self, t)",
    "torch._subclasses.fake_tensor.FakeTensorConverter.set_tensor_memo(self, t, v)",
    "torch._subclasses.fake_tensor._is_indexed_device_type",
    "torch._dynamo.trace_rules.add",
    "torch._dynamo.trace_rules.get_torch_obj_rule_map()",
    "torch._dynamo.variables.torch.constant_fold_functions",
    "torch._dynamo.variables.torch.TorchInGraphFunctionVariable",
    without='torch.compile(f, backend="lazy") of lazy tensors raises: call f as it is, or capture it',
)
COLLECTIVES = Port(
    "the order of collectives",
    "torch.distributed.ProcessGroup",
    "torch.distributed.destroy_process_group(group)",
    without="collectives of CPU tensors may come before recorded ones: call mark_step(wait=True) before them",
)
FUNCTIONAL_COLLECTIVES = Port(
    "the order of functional collectives",
    "torch.ops._c10d_functional.all_reduce.default._op_dk",
    "torch._C.DispatchKey.CompositeExplicitAutograd",
    without="functional collectives of CPU tensors may come before recorded ones: call mark_step(wait=True) before",
)
EXCHANGES = Port(
    "messages between ranks",
    "torch.distributed.ProcessGroup.send",
    "torch.distributed.ProcessGroup.recv",
    "torch.distributed.batch_isend_irecv(p2p_op_list)",
    "torch.distributed.distributed_c10d._check_p2p_op_list",
    "torch._C._distributed_c10d._create_work_from_future",
    without="send and recv of lazy tensors raise",
)
DEVICE_MESHES = Port(
    "backends of process groups by device",
    "torch.distributed.get_default_backend_for_device(device)",
    without='give init_process_group a backend by name: "lazy" has none',
)
DATA_PARALLEL = Port(
    "DistributedDataParallel",
    "torch.distributed.Reducer",
    "torch.distributed._register_comm_hook",
    "torch.distributed._register_builtin_comm_hook",
    "torch.distributed._broadcast_coalesced",
    "torch.distributed._compute_bucket_assignment_by_size",
    "torch.autograd.Variable._execution_engine.queue_callback",
    Probe("a reducer with the arguments and methods that are known", process_groups.has_known_reducer),
    without="DistributedDataParallel of a lazy module raises",
)
FULLY_SHARD = Port(
    "fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard.fully_shard(module)",
    without='fully_shard needs mesh=init_device_mesh("lazy", ...) and a module that is on the device',
)
FULLY_SHARD_BACKWARD = Port(
    "the end of backwards under fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.finalize_backward(self)",
    without="a backward that does not use a module whose parameters fully_shard gathered raises",
)
DTENSOR_RANDOM = Port(
    "random numbers of DTensors",
    "torch.distributed.tensor._random.OffsetBasedRNGTracker._get_device_state(self)",
    "torch.distributed.tensor._random.OffsetBasedRNGTracker._distribute_region(self, spec, generator)",
    "torch.distributed.tensor._random.OffsetBasedRNGTracker._compute_rng_offsets(self, spec)",
    without="random operators on DTensors of lazy tensors raise",
)
BUNDLES = Port(
    "bundles of torch.compiler",
    "torch.compiler.save_cache_artifacts()",
    "torch.compiler._cache.CacheArtifact",
    "torch.compiler._cache.CacheArtifactFactory.register",
    "torch.compiler._cache.CacheArtifactManager.record_artifact",
    without="torch.compiler.save_cache_artifacts carries no graphs of lazy_backend: use lazy_backend.cache.export",
)
PICKLING = Port(
    "saved tensors",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._tensor._rebuild_from_type_v2",
    "torch.storage._new_dtypes",
    without="save lazy tensors as tensor.cpu(), or with lazy_backend.save",
)

# ----- what is reached: without the first four there are no lazy tensors


def _restores_gradients() -> bool:
    before = torch.is_grad_enabled()
    with torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(not before)
    return torch.is_grad_enabled() == before


def _wraps() -> bool:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            return NotImplemented

    make: Any = torch.Tensor._make_wrapper_subclass
    made = make(Wrapped, (2, 3), (3, 1), 0, None, torch.float32, torch.strided, torch.device("cpu"))
    return type(made) is Wrapped and made.shape == (2, 3) and made._version == 0


DISPATCHER = Port(
    "dispatcher",
    "torch._ops.OpOverload",
    "torch._ops.HigherOrderOperator",
    "torch._C.DispatchKeySet",
    "torch._C.DispatchKey.CompositeImplicitAutograd",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._AutoDispatchBelowADInplaceOrView",
    "torch._C._dispatch_keys",
    "torch.ops.aten.add.Tensor._schema",
    "torch.ops.aten.add.Tensor._opname",
    "torch.ops.aten.add.Tensor._overloadname",
    "torch.ops.aten.add.Tensor._op_dk",
    "torch.ops.aten.add.Tensor._can_decompose()",
    Probe(
        "aten::add.Tensor has a kernel for the CPU",
        lambda: torch._C._dispatch_has_kernel_for_dispatch_key("aten::add.Tensor", "CPU"),
    ),
    without="there are no lazy tensors",
    essential=True,
)
TENSOR_CLASSES = Port(
    "tensor classes",
    "torch._C._disabled_torch_function_impl",
    "torch._C.TensorBase.data.__set__",
    "torch._C._DisableTorchDispatch",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._set_conj",
    "torch._C._set_neg",
    "torch.Tensor._is_view",
    "torch.Tensor._base",
    "torch.UntypedStorage._cdata",
    "torch.Generator._cdata",
    Probe("Tensor._make_wrapper_subclass takes a geometry, a dtype, a layout and a device", _wraps),
    without="there are no lazy tensors",
    essential=True,
)
THREAD_MODES = Port(
    "state of a thread",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._DisableAutocast",
    "torch._C.DisableTorchFunction",
    "torch._C._is_any_autocast_enabled",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._dispatch_tls_local_exclude_set",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()",
    "torch.utils._device.DeviceContext",
    "torch.utils._python_dispatch._disable_current_modes()",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack()",
    "torch.overrides._get_current_function_mode_stack()",
    Probe("torch._C._InferenceMode restores the gradient mode", _restores_gradients),
    without="there are no lazy tensors",
    essential=True,
)
TREES = Port(
    "trees of arguments",
    "torch.utils._pytree.SUPPORTED_NODES",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten(tree)",
    "torch.utils._pytree.tree_leaves(tree)",
    "torch.utils._pytree.tree_map(func, tree)",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten(leaves, treespec)",
    without="there are no lazy tensors",
    essential=True,
)
FAKE_TENSORS = Port(
    "inferred metadata",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch._C._unset_dispatch_mode",
    "torch._C._TorchDispatchModeKey.FAKE",
    "torch._library.utils.has_fake_kernel(op)",
    without='unseen calls run at once also with first_sight="record", custom operators always do, and serve() raises',
)
DECOMPOSITIONS = Port(
    "decompositions of operators",
    "torch._decomp.decomposition_table",
    without="trials of compiled graphs may refuse some that round norms otherwise than eager",
)
ATTENTION = Port(
    "choice of attention kernels",
    "torch._fused_sdp_choice",
    without="attention is computed as matrix products, which takes longer and more memory",
)
SPARSE = Port(
    "sparse tensors",
    "torch.Tensor._make_subclass",
    "torch.Tensor._indices",
    "torch.Tensor._values",
    "torch.Tensor._coalesced_",
    "torch._C._current_autograd_node",
    without="sparse tensors cannot be moved to the lazy device: compute with them on the CPU",
)
PRINTING = Port(
    "printed tensors",
    "torch._tensor_str.PRINT_OPTS",
    "torch._tensor_str._tensor_str(self, indent)",
    "torch._tensor_str._add_suffixes(tensor_str, suffixes, indent, force_newline)",
    without="lazy tensors are printed in a shorter form",
)
PROFILER_RANGES = Port(
    "ranges in the profiler",
    "torch._C._profiler._RecordFunctionFast",
    "torch.autograd.profiler._is_profiler_enabled",
    without="torch.profiler shows no ranges of lazy_backend",
)
REGIONS = Port(
    "captured modules and optimizers",
    "torch.nn.Module._call_impl(self)",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.Module._compiled_call_impl",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._will_engine_execute_node",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter(tensors)",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.nn.utils.parametrize._cache_enabled",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    Probe("modules have the attributes that they had", hooks.has_known_attributes_of_modules),
    Probe("optimizers have the attributes that they had", hooks.has_known_attributes_of_optimizers),
    Probe("nodes of autograd tell which tensors they saved", autograd_engine.tells_saved_tensors),
    without="capture(module) and capture(optimizer) change nothing: they are recorded as they are written",
)
REPLAYS = Port(
    "replays of functions",
    "torch._C._push_on_torch_function_stack",
    "torch._C._pop_torch_function_stack",
    "torch._C._get_function_stack_at",
    "torch.autograd._engine_run_backward",
    "torch.nn.utils.parametrize._cache_enabled",
    "torch.overrides.has_torch_function",
    "torch.optim.lr_scheduler._update_param_group_val(param_group, key, val)",
    "torch.Tensor._use_count",
    Probe("modules have the attributes that they had", hooks.has_known_attributes_of_modules),
    Probe("optimizers have the attributes that they had", hooks.has_known_attributes_of_optimizers),
    Probe("the garbage collector's youngest generation has what was just made", cpython.sees_young_objects),
    Probe("reference counts count every holder", cpython.counts_holders),
    Probe("nodes of autograd tell which tensors they saved", autograd_engine.tells_saved_tensors),
    Probe("instructions tell which names they read", cpython.reads_names),
    Probe("frames tell which function runs", cpython.frames_tell_functions),
    Probe("abstract classes tell which classes were registered", cpython.sees_registrations),
    without="captured functions are called as they are written, at the cost of recording them",
)
PROCESS_GROUPS = Port(
    "process groups",
    "torch.distributed.distributed_c10d._resolve_process_group(group_name)",
    "torch.distributed.ProcessGroup._allgather_base",
    "torch.distributed.ProcessGroup._reduce_scatter_base",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroup._device_types",
    without="collectives of lazy tensors raise",
)
DEVICE_GRAPHS = Port(
    "graphs of a device",
    "torch._C._storage_Use_Count",
    "torch._C._dispatch_key_for_device",
    "torch.library._impls",
    without="plans are launched kernel by kernel: config.device_graphs does nothing",
)
BACKENDS = Port(
    "table of torch.compile's backends",
    "torch._dynamo.lookup_backend(compiler_fn)",
    "torch._dynamo.exc.InvalidBackend",
    without="graphs are traced again before a backend other than Inductor gets them, at their first run",
)
BOXED_CODE = Port(
    "arguments in one list",
    "torch.fx.graph._BoxedCodeGen",
    without="a graph that its backend leaves as it is keeps its inputs in memory until it ends",
)
TRACING_ERRORS = Port(
    "errors without Dynamo's frames",
    "torch._dynamo.exc.ShortenTraceback(args, first_useful_frame)",
    "torch._dynamo.symbolic_convert.tls",
    without="the error that torch.compile gives for lazy tensors shows the compiler's frames",
)

# ----- the compiler

INDUCTOR = Port(
    "Inductor",
    "torch._inductor.config.patch",
    "torch._functorch.config.patch",
    "torch._inductor.exc.CppCompileError",
    "torch._inductor.utils.fresh_cache()",
    "torch._inductor.fx_utils.get_node_storage(node)",
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    "torch._inductor.decomposition.select_decomp_table()",
    "torch._guards.tracing(context)",
    "torch._guards.TracingContext",
    "torch._dynamo.source.ConstantSource",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symbol(self, val, source, dynamic_dim, constraint_dim)",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symintnode(self, sym, hint, source)",
    "torch._inductor.standalone_compile(gm, example_inputs, dynamic_shapes, options, aot)",
    without='graphs are interpreted: another backend of torch.compile compiles them, as config.backend = "..."',
)
ARTEFACTS = Port(
    "artefacts of PyTorch's own",
    Probe("artefacts can be read", native_code.has_known_artefacts),
    without="graphs that C++ alone cannot run, such as a GPU's, are interpreted",
)
RUNNERS = Port(
    "runs without Python",
    "torch._inductor.async_compile.AsyncCompile.cpp_pybinding(self, argtypes, source_code)",
    "torch._inductor.cpp_builder.CppBuilder",
    "torch._inductor.cpp_builder.CppTorchDeviceOptions",
    "torch._inductor.cpu_vec_isa.pick_vec_isa()",
    "torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr",
    "torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors",
    "torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs",
    Probe("artefacts have the parts that are known", native_code.has_known_entries),
    Probe("PyTorch's interface in C has products of matrices", lambda: "aoti_torch_cpu_mm_out" in native_code.shims()),
    without="compiled graphs run from Python, and none runs beside recording",
)
PRODUCTS = Port(
    "products by oneDNN",
    Probe("libtorch_cpu has at::native::mkldnn_matmul", lambda: native_code.has_symbols(native_code.PRODUCT)),
    without="the library that PyTorch takes multiplies matrices, also where oneDNN would be faster",
)
MASKS = Port(
    "masks of dropouts in C++",
    Probe("libtorch_cpu has its generators and bernoulli_", native_code.has_masks),
    without="steps with dropout need Python and do not run beside recording",
)
NORM_OF_LISTS = Port(
    "norms of lists in C++",
    Probe("libtorch_cpu has at::linalg_vector_norm", lambda: native_code.has_symbols(native_code.VECTOR_NORM)),
    without="steps that clip gradients need Python and do not run beside recording",
)
LSTM_LAYERS = Port(
    "layers of an LSTM in C++",
    Probe("libtorch_cpu has its stable interface to the dispatcher, and oneDNN's LSTM", native_code.has_lstm),
    without="steps with nn.LSTM on a CPU need Python and do not run beside recording",
)
INSTRUCTIONS = Port(
    "instructions that are not tried",
    "torch._inductor.cpu_vec_isa.VecISA.check_build(self, code)",
    "torch._inductor.cpu_vec_isa.supported_vec_isa_list",
    "torch._inductor.cpu_vec_isa.valid_vec_isa_list.cache_clear()",
    "torch._inductor.config.cpp.vec_isa_ok",
    without="the first compile takes seconds more, in which Inductor tries what instructions there are",
)
SETTINGS = Port(
    "settings of Inductor",
    "torch._inductor.config._config",
    "torch._inductor.config._is_default",
    "torch._inductor.config.save_config_portable(ignore_private_configs)",
    without="what a program sets in torch._inductor.config has no part in how its lazy tensors are compiled",
)

# Defects of Inductor. Each is one port, as each is mended in another version. See `replacements/inductor_patches.py`.

READS_OF_WHAT_IS_WRITTEN = Port(
    "Inductor: operands in memory that is written",
    "torch._inductor.lowering.lowerings",
    "torch._inductor.lowering.inplace_foreach_ops",
    "torch._inductor.lowering.clone(x)",
    "torch._inductor.inductor_prims._unsafe_index_put_",
    "torch._inductor.ir.TensorBox",
    "torch._inductor.ir.BaseView",
    "torch._inductor.ir.ReinterpretView",
    without="x.index_add_(0, i, x.clone()) and the like may give wrong numbers: write into a copy of x",
)
READS_AFTER_WRITES = Port(
    "Inductor: loops that read what another wrote",
    KnownSource("torch._inductor.scheduler.Scheduler.fusable_weak_dep", ("9ce5df50", "3f8d5dc9", "79f82c0f")),
    "torch._inductor.dependencies.MemoryDep",
    "torch._inductor.scheduler.ForeachKernelSchedulerNode",
    without="two writes into one tensor in a step, the second of which reads it, may give wrong numbers",
)
TRANSPOSED_SUMS = Port(
    "Inductor: transposed sums into memory",
    KnownSource("torch._inductor.codegen.cpp.CppTile2DKernel.store", ("55151ced", "c67e6b96")),
    KnownSource("torch._inductor.codegen.cpp.CppVecKernel.store", ("0716aaac", "9e3dda8a")),
    without="x.index_add_(0, i, y.t()) and backwards of embeddings may give wrong numbers: make y contiguous",
)
CHECKS_FIRST = Port(
    "Inductor: checks of values before writes",
    "torch._inductor.scheduler.Scheduler.compute_dependencies(self)",
    "torch._inductor.dependencies.MemoryDep",
    "torch._inductor.virtualized.V",
    without="a step whose values an operator refuses may have changed parameters by then",
)
LATE_READS = Port(
    "Inductor: inputs that are read after they are written",
    "torch._inductor.config.post_grad_custom_post_pass",
    "torch._inductor.custom_graph_pass.get_hash_for_files(paths)",
    without="steps that swap tensors in place may give wrong numbers",
)
UNREAD_BUFFERS = Port(
    "Inductor: memory that is written and not read",
    "torch._inductor.loop_body.LoopBody.get_read_expr(self, buffer_name)",
    "torch._inductor.loop_body.LoopBody.get_write_expr(self, buffer_name)",
    without="graphs that write into a part of what a loop over rows made may not be compiled: KeyError 'buf1'",
)
STORED_TWICE = Port(
    "Inductor: sums that are stored twice",
    "torch._inductor.codegen.cpp.CppVecKernel.store_reduction(self, name, index, value)",
    without="graphs with several equal sums in float16 or bfloat16 may not be compiled: a C++ compile error",
)


# ----- what records known calls in C++

NATIVE_RECORDER = Port(
    "known calls in C++",
    Probe("Linux", lambda: sys.platform == "linux"),
    Probe("a Python with a global lock", lambda: getattr(sys, "_is_gil_enabled", lambda: True)()),
    Probe(
        "PyTorch's headers", lambda: (Path(torch.__file__).parent / "include/c10/core/impl/PyInterpreter.h").exists()
    ),
    without="a call that was recorded before is recorded in Python again, which takes longer",
)


def check_essential() -> None:
    """Raise `ImportError`, which says what is missing, if a port does not fit without which there is no lazy tensor."""
    for port in ports.values():
        if port.essential and port.obstacle() is not None:
            raise ImportError(str(port))
