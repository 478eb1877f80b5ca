// Records known calls. In: calls of operators with lazy tensors, as PyTorch's dispatcher hands them to Python. Out:
// their results as lazy tensors, if the program has made the very same call here before; all others go to Python.
// Factories, which make tensors from nothing, come by the key Lazy rather than Python's. Copies of batches from the host
// are made here too: nothing is recorded of them.
//
// Note [Known calls in C++]
// Python decides everything: how a call is described, which of its parts are in the key, what runs at once. It leaves
// a node for each call at each place of a program. This file only follows a trace along such nodes: where a node
// after the cursor is that of the same operator with the same key, the results are made from what the node says. It
// makes no node and no key. Wherever something is not plain - another path, a mode of dispatch, a trace that runs its
// calls, an operand from another device - it changes nothing, and Python gets the call as if this file were not there.
//
// Note [One commit]
// A call is compared first, which changes nothing. Reading off a node what it says calls Python, and where results are
// allocated the garbage collector may run, and with it finalizers, which may record, sync or forget all paths. So what is
// in use by then is kept, and the trace is looked at again. From there to the last store no Python
// code can run: no other thread, as the GIL is held, no signal handler and no finalizer. Nothing is ever half recorded.
// The context's lock is not taken, as nobody could ask for it meanwhile; but a call of another thread than the one that
// holds it goes to Python, and waits there.
//
// Note [Calls at once in C++]
// Where a trace says that its calls run at once (`at_once`), nothing is pending and no run is under way: each storage has
// its value or was never used. Then a call of an operator that Python has approved is PyTorch's own kernel on the real
// tensors. Its results are wrapped with the aliasing that they have: a tensor that was given comes back itself, what
// shares memory with an operand is a view of it, all else is new memory. From where operands are looked up to the kernel
// no Python code can run; what finalizers do later finds the results' values there, whatever became of the trace.

#include <Python.h>
#include <structmember.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Export.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

// of torch/csrc/autograd/python_variable.h, which takes as long to compile as all the rest
TORCH_PYTHON_API PyObject* THPVariable_Wrap(const at::TensorBase& tensor, PyTypeObject* type);
TORCH_PYTHON_API extern PyObject* THPVariableClass;

namespace {

using c10::IValue;
using c10::OperatorHandle;

// ----- references

class Ref {  // a strong reference
 public:
  Ref() = default;
  static Ref taking(PyObject* object) { Ref made; made.object_ = object; return made; }
  static Ref to(PyObject* object) { return taking(Py_XNewRef(object)); }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept { std::swap(object_, other.object_); return *this; }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct WithoutGil {
  explicit WithoutGil(bool is_wanted) : released(is_wanted ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() { if (released != nullptr) PyEval_RestoreThread(released); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  PyThreadState* released;
};

// ----- what Python handed over: classes, the places of their slots, and objects that mark kinds of arguments

struct Classes {
  PyTypeObject *lazy_tensor, *storage, *view, *token, *fresh, *view_result, *same, *call, *lock, *context;
} classes;

struct Markers {
  PyObject *is_true, *is_false, *is_float, *is_complex, *enter, *unwritten;
  PyObject* layout;  // torch.strided
  std::array<PyObject*, 4> formats;  // by the number of the memory format
} markers;

struct Names {
  PyObject *data, *dispatch, *function;
} names;

using Slot = Py_ssize_t;

struct {
  Slot context, epoch, token, meta;  // of TensorData
  Slot tensor, error;  // of LazyStorage
  Slot storage;  // of ViewData
} data_slots;

struct {
  Slot epoch, cursor, inputs, groups, constants, seeds, pending, computed, unfinished, default_dtype, changes, longest;
  Slot at_once, room;
} trace_slots;

struct {
  Slot trace, lock, backing, pace, device;
} context_slots;

struct {
  Slot latest, batches, over, came;
} pace_slots;

struct {
  Slot next_key, next, branches, call, depth, known;
} node_slots;

Slot owner_slot;  // of an RLock: the number of the thread that holds it
PyObject* dispatch_in_python;  // what `LazyTensor.__torch_dispatch__` is unless somebody watches calls
PyObject* input_tokens;  // a list
PyObject* recorded_alike;  // (operator) -> operators recorded as it, and of arguments left out of keys; or None
PyObject *draw_seed, *return_seed;  // () -> seed, and (seed) for one that was not used
PyObject* made_context;  // (index or None) -> the context of that device, or None if it was not used before
PyObject* unwritten_storage;  // (context, meta) -> memory that nobody has used yet
PyObject* add_event;  // (event): count something
PyObject *upload_seconds, *upload_bytes, *download_seconds, *download_bytes;  // names of metrics
std::vector<OperatorHandle> sharing;  // operators that give another tensor for the same data
std::vector<OperatorHandle> returning;  // operators that give the very tensor
std::optional<OperatorHandle> copying;  // copy_
std::optional<c10::impl::LocalDispatchKeySet> usual_keys;  // of a thread in no mode
PyObject* see_batch;  // (context, bytes): a tensor from the host comes while something is recorded; may end a step
PyObject* most_batches;  // that a step may take
Slot impl_slot;  // of a tensor's Python object: where its TensorImpl is
PyObject* runs_alike;  // (operator): whether a call that runs at once is no more than the operator on real tensors
PyObject *draw, *take_back;  // () -> (seed, ...), and (that) for a seed that was not used
PyObject* make_meta;  // (shape, stride, offset, dtype) -> the meta of that geometry
PyObject* wrap_result;  // (context, real, [(lazy, real)]) -> a lazy tensor for a result that is not plain
PyObject* see_calls;  // (context, storages): so many storages were made by calls that ran at once
std::optional<c10::impl::LocalDispatchKeySet> kernel_keys;  // of a kernel of PyTorch's in a thread in no mode
int64_t num_known = 0, num_others = 0, num_at_once = 0, num_reads = 0;

inline PyObject*& slot_of(PyObject* object, Slot place) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + place);
}

inline unsigned long owner_of(PyObject* lock, Slot place) {
  return *reinterpret_cast<unsigned long*>(reinterpret_cast<char*>(lock) + place);
}

// Of the context of a device, which keeps it until Python code runs; null where it has none yet.
inline PyObject* in_context(PyObject* context, Slot place) {
  return Py_TYPE(context) == classes.context ? slot_of(context, place) : nullptr;
}

inline std::optional<c10::Device> device_in(PyObject* context, Slot place) {
  PyObject* found = in_context(context, place);
  if (found == nullptr || !THPDevice_Check(found)) return std::nullopt;
  return reinterpret_cast<THPDevice*>(found)->device;
}

inline bool is_none(PyObject* object) { return object == nullptr || object == Py_None; }

// Put a value into a slot. The old value comes back: it is dropped when everything is in place.
inline Ref put(PyObject* object, Slot place, PyObject* value) {
  PyObject*& slot = slot_of(object, place);
  Ref old = Ref::taking(slot);
  slot = Py_NewRef(value);
  return old;
}

// An attribute that its owner keeps alive, or null.
PyObject* attribute(PyObject* owner, const char* name) {
  PyObject* found = PyObject_GetAttrString(owner, name);
  Py_XDECREF(found);
  return found;
}

// What Python raised goes on into the program.
[[noreturn]] void throw_raised() {
  if (PyErr_Occurred() == nullptr) PyErr_NoMemory();
  python_error raised;
  raised.persist();
  throw raised;
}

// What a function of Python's returns.
Ref called(PyObject* function, PyObject* argument, PyObject* other = nullptr) {
  Ref found = Ref::taking(PyObject_CallFunctionObjArgs(function, argument, other, nullptr));
  if (!found) throw_raised();
  return found;
}

// ----- lazy tensors

inline PyObject* lazy_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object != nullptr && Py_TYPE(object) == classes.lazy_tensor ? object : nullptr;
}

// What a lazy tensor stands for.
inline Ref data_of(PyObject* lazy) {
  Ref found = Ref::taking(PyObject_GetAttr(lazy, names.data));
  if (!found) PyErr_Clear();
  return found;
}

inline PyObject* storage_of(PyObject* data) {
  return Py_TYPE(data) == classes.storage ? data : slot_of(data, data_slots.storage);
}

Ref tuple_of(at::IntArrayRef numbers) {
  Ref made = Ref::taking(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t place = 0; made && place < numbers.size(); ++place)
    PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(place), PyLong_FromLongLong(numbers[place]));
  return made;
}

// A place in memory, which somebody else keeps.
struct Geometry {
  at::IntArrayRef sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;

  size_t num_bytes() const {
    int64_t last = offset;  // the furthest element
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      if (sizes[dim] == 0) return 0;
      last += (sizes[dim] - 1) * strides[dim];
    }
    return (last + 1) * dtype.itemsize();
  }

  size_t hash() const {
    size_t found = static_cast<size_t>(offset) * 31 + static_cast<size_t>(dtype.toScalarType());
    for (const at::IntArrayRef numbers : {sizes, strides})
      for (const int64_t number : numbers) found = (found + static_cast<size_t>(number)) * 0x9E3779B97F4A7C15;
    return (found * 0x9E3779B97F4A7C15) >> 40;
  }

  bool operator==(const Geometry& other) const {
    return sizes == other.sizes && strides == other.strides && offset == other.offset && dtype == other.dtype;
  }

  // As Python knows it, or null and an error. Kept: a program has few geometries, or ever new ones, which take the places
  // of older ones.
  Ref meta() const;
};

struct OwnGeometry {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  operator Geometry() const { return {sizes, strides, offset, dtype}; }
};

Ref Geometry::meta() const {
  struct Known {
    OwnGeometry geometry;
    Ref meta;
  };
  constexpr size_t kMost = 4096;
  static auto& table = *new std::array<Known, kMost>;  // for the life of the process, as Python ends first
  Known& known = table[hash() % kMost];
  if (known.meta && static_cast<Geometry>(known.geometry) == *this) return Ref::to(known.meta.get());
  OwnGeometry own{sizes.vec(), strides.vec(), offset, dtype};
  const Ref shape = tuple_of(sizes), stride = tuple_of(strides), start = Ref::taking(PyLong_FromLongLong(offset));
  PyObject* kind = reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype.toScalarType()));
  Ref made = shape && stride && start ? Ref::taking(PyObject_CallFunctionObjArgs(
      make_meta, shape.get(), stride.get(), start.get(), kind, nullptr)) : Ref();
  if (!made) return made;
  known.geometry = std::move(own);
  const Ref old = std::exchange(known.meta, Ref::to(made.get()));  // dropped when everything is in place
  return made;
}

// A tensor without memory, as `torch.Tensor._make_wrapper_subclass` makes it.
at::Tensor bare_tensor(const Geometry& geometry, size_t num_bytes, c10::Device device) {
  static c10::Allocator* const allocator = c10::GetAllocator(c10::kMeta);
  c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, c10::DataPtr(nullptr, device), allocator,
                       /*resizable=*/true);
  auto made = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::Lazy),
                                                   geometry.dtype);
  made->set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
  made->set_python_dispatch(true);
  return at::Tensor(std::move(made));
}

// Give a bare tensor the Python object that stands for `data`. Undefined if there is no memory for one.
at::Tensor lazy_tensor(at::Tensor bare, PyObject* data) {
  Ref object = Ref::taking(THPVariable_Wrap(bare, classes.lazy_tensor));
  if (!object || PyObject_SetAttr(object.get(), names.data, data) != 0) {
    PyErr_Clear();
    return at::Tensor();
  }
  return bare;
}

Ref new_data(PyTypeObject* type, PyObject* context, PyObject* epoch, PyObject* token, PyObject* meta) {
  Ref made = Ref::taking(type->tp_alloc(type, 0));
  if (!made) {
    PyErr_Clear();
    return made;
  }
  slot_of(made.get(), data_slots.context) = Py_NewRef(context);
  slot_of(made.get(), data_slots.epoch) = Py_NewRef(epoch);
  slot_of(made.get(), data_slots.token) = Py_NewRef(token);
  slot_of(made.get(), data_slots.meta) = Py_NewRef(meta);
  return made;
}

// The list that notes storages, of a trace whose calls run at once; null where they do not.
Ref storages_in(PyObject* context) {
  PyObject* trace = in_context(context, context_slots.trace);
  PyObject* list = trace != nullptr ? slot_of(trace, trace_slots.at_once) : nullptr;
  return Ref::to(is_none(list) ? nullptr : list);
}

Py_ssize_t num_unseen = 0;  // storages that were noted since Python was told

// Put a weak reference into a list of them: in the place of one whose object is gone, where a few looks find one. The
// list would otherwise grow between two looks of Python's, and the garbage collector would run for that. False, and an
// error, if there is no memory.
bool note(PyObject* list, Ref reference) {
  static Py_ssize_t place = 0;
  const Py_ssize_t size = PyList_GET_SIZE(list);
  for (int looks = 0; looks < 4 && size > 0; ++looks) {
    place = place + 1 < size ? place + 1 : 0;
    if (PyWeakref_GET_OBJECT(PyList_GET_ITEM(list, place)) == Py_None)
      return PyList_SetItem(list, place, reference.release()) == 0;
  }
  return PyList_Append(list, reference.get()) == 0;
}

// A storage that no trace has recorded, in the list `storages`. Null, and an error, if there is no memory.
Ref noted_storage(PyObject* context, PyObject* storages, PyObject* token, PyObject* meta, PyObject* tensor) {
  Ref made = new_data(classes.storage, context, Py_None, token, meta);
  if (!made) return Ref::taking(PyErr_NoMemory());
  slot_of(made.get(), data_slots.tensor) = Py_NewRef(tensor);
  slot_of(made.get(), data_slots.error) = Py_NewRef(Py_None);
  Ref reference = Ref::taking(PyWeakref_NewRef(made.get(), nullptr));
  if (!reference || !note(storages, std::move(reference))) return Ref();
  ++num_unseen;
  return made;
}

// Tell Python of storages that were noted, if they are many. False, and an error, if that fails.
bool tell_of_storages(PyObject* context) {
  constexpr Py_ssize_t kMostUnseen = 512;
  if (num_unseen < kMostUnseen) return true;
  const Ref number = Ref::taking(PyLong_FromSsize_t(std::exchange(num_unseen, 0)));
  return static_cast<bool>(Ref::taking(PyObject_CallFunctionObjArgs(see_calls, context, number.get(), nullptr)));
}

// ----- what a node says

enum class Kind : uint8_t {
  Token, Enter, Int, Bool, None, Float, String, Enumerator, List, Default, LeftOut,
};

struct Part {  // of a key
  Kind kind = Kind::None;
  int64_t number = 0;  // Int, Bool, Enumerator; the alias group of Enter
  PyObject* token = nullptr;  // Token
  PyObject *meta = nullptr, *base = nullptr;  // Enter
  std::string text;
  std::vector<Part> items;
  IValue value;  // Default: what an argument has that the key leaves out
};

enum class Gives : uint8_t { Nothing, Fresh, View, Same };

struct Result {
  Gives gives = Gives::Nothing;
  PyObject *token = nullptr, *meta = nullptr;
  int argument = -1, item = -1;  // the operand of View and Same
  OwnGeometry geometry;
  size_t num_bytes = 0;
};

struct Known {  // a Python object, which the node keeps
  PyObject_HEAD
  struct Content {
    Ref key, call;  // keep alive what the parts point to
    Ref alike;
    std::vector<PyObject*> ops;  // that are recorded so; none if calls like this one go to Python
    std::vector<Part> parts;  // by the arguments of the schema
    std::vector<Result> results;
    std::vector<size_t> written_lists;
    long depth = 0;  // of the node
    bool returns_list = false, is_seeded = false;

    bool is_of(PyObject* op) const { return std::find(ops.begin(), ops.end(), op) != ops.end(); }
  };
  Content* content;
};

void drop_known(PyObject* self) {
  delete reinterpret_cast<Known*>(self)->content;
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject known_type = {PyVarObject_HEAD_INIT(nullptr, 0) "lazy_backend.Known", sizeof(Known)};

bool read_part(PyObject* found, Part& part) {
  PyTypeObject* type = Py_TYPE(found);
  if (type == classes.token) {
    part.kind = Kind::Token;
    part.token = found;
  } else if (found == Py_None) {
    part.kind = Kind::None;
  } else if (found == markers.is_true || found == markers.is_false) {
    part.kind = Kind::Bool;
    part.number = found == markers.is_true;
  } else if (found == markers.is_float) {
    part.kind = Kind::Float;
  } else if (type == &PyLong_Type) {
    int overflows = 0;
    part.kind = Kind::Int;
    part.number = PyLong_AsLongLongAndOverflow(found, &overflows);
    return overflows == 0;
  } else if (type == &PyUnicode_Type) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(found, &size);
    if (text == nullptr) return false;
    part.kind = Kind::String;
    part.text.assign(text, size);
  } else if (THPDtype_Check(found)) {
    part.kind = Kind::Enumerator;
    part.number = static_cast<int64_t>(reinterpret_cast<THPDtype*>(found)->scalar_type);
  } else if (found == markers.layout) {
    part.kind = Kind::Enumerator;
    part.number = static_cast<int64_t>(c10::Layout::Strided);
  } else if (type == &PyTuple_Type) {
    const Py_ssize_t size = PyTuple_GET_SIZE(found);
    PyObject* head = size > 0 ? PyTuple_GET_ITEM(found, 0) : nullptr;
    if (head == markers.enter) {
      part.kind = Kind::Enter;
      part.meta = PyTuple_GET_ITEM(found, 1);
      part.number = PyLong_AsLongLong(PyTuple_GET_ITEM(found, 2));
      part.base = PyTuple_GET_ITEM(found, 3);
      return true;
    }
    // floats that are structure, and complex numbers, are rare: Python compares them
    if (head == markers.is_complex ||
        (head == markers.is_float && size == 2 && PyUnicode_Check(PyTuple_GET_ITEM(found, 1))))
      return false;
    part.kind = Kind::List;
    part.items.resize(size);
    for (Py_ssize_t place = 0; place < size; ++place)
      if (!read_part(PyTuple_GET_ITEM(found, place), part.items[place])) return false;
  } else {
    for (size_t format = 0; format < markers.formats.size(); ++format)
      if (found == markers.formats[format]) {
        part.kind = Kind::Enumerator;
        part.number = static_cast<int64_t>(format);
        return true;
      }
    return false;
  }
  return true;
}

bool read_sizes(PyObject* tuple, std::vector<int64_t>& sizes) {
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(tuple); ++place)
    sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, place)));
  return PyErr_Occurred() == nullptr;
}

// The parts of a key: the operator, positional arguments, then names and values. `left_out`: names of arguments.
bool read_arguments(const c10::FunctionSchema& schema, PyObject* key, PyObject* call, PyObject* left_out,
                    Known::Content& content) {
  PyObject *args = attribute(call, "args"), *kwargs = attribute(call, "kwargs");
  if (args == nullptr || kwargs == nullptr) return false;
  const Py_ssize_t num_args = PyTuple_GET_SIZE(args), num_named = PyTuple_GET_SIZE(kwargs);
  if (PyTuple_GET_SIZE(key) != 1 + num_args + 2 * num_named) return false;
  const auto& arguments = schema.arguments();
  content.parts.resize(arguments.size());
  Py_ssize_t next = 1;  // in the key; names come in the order of the schema, as constants do
  for (size_t place = 0; place < arguments.size(); ++place) {
    bool is_given = static_cast<Py_ssize_t>(place) < num_args;
    if (!is_given && next < PyTuple_GET_SIZE(key) &&
        PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(key, next), arguments[place].name().c_str()) == 0) {
      is_given = true;
      ++next;
    }
    if (is_given) {
      if (!read_part(PyTuple_GET_ITEM(key, next++), content.parts[place])) return false;
    } else {
      if (!arguments[place].default_value()) return false;
      content.parts[place].kind = Kind::Default;
      content.parts[place].value = *arguments[place].default_value();
      for (Py_ssize_t other = 0; other < PyTuple_GET_SIZE(left_out); ++other)
        if (arguments[place].name() == PyUnicode_AsUTF8(PyTuple_GET_ITEM(left_out, other)))
          content.parts[place].kind = Kind::LeftOut;
    }
    const auto* alias = arguments[place].alias_info();
    if (alias != nullptr && alias->isWrite() && arguments[place].type()->kind() == c10::TypeKind::ListType)
      content.written_lists.push_back(place);
  }
  return next == PyTuple_GET_SIZE(key);
}

bool read_result(const c10::FunctionSchema& schema, PyObject* found, Result& result) {
  if (found == Py_None) return true;
  PyTypeObject* type = Py_TYPE(found);
  if (type == classes.same || type == classes.view_result) {
    PyObject* path = attribute(found, "path");
    if (path == nullptr || PyTuple_GET_SIZE(path) < 1 || PyTuple_GET_SIZE(path) > 2) return false;
    PyObject* head = PyTuple_GET_ITEM(path, 0);
    if (PyLong_Check(head)) {
      result.argument = static_cast<int>(PyLong_AsLong(head));
    } else {
      for (size_t place = 0; place < schema.arguments().size(); ++place)
        if (schema.arguments()[place].name() == PyUnicode_AsUTF8(head)) result.argument = static_cast<int>(place);
    }
    if (result.argument < 0) return false;
    if (PyTuple_GET_SIZE(path) == 2) result.item = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(path, 1)));
  }
  result.gives = type == classes.same ? Gives::Same : type == classes.fresh ? Gives::Fresh : Gives::View;
  if (result.gives == Gives::Same) return true;
  result.token = attribute(found, "token");
  result.meta = attribute(found, "meta");
  PyObject* wrapper = attribute(found, "wrapper");
  if (result.token == nullptr || result.meta == nullptr || wrapper == nullptr) return false;
  if (attribute(result.meta, "conj") != Py_False || attribute(result.meta, "neg") != Py_False) return false;
  OwnGeometry& geometry = result.geometry;
  if (!read_sizes(PyTuple_GET_ITEM(wrapper, 0), geometry.sizes)) return false;
  if (!read_sizes(PyTuple_GET_ITEM(wrapper, 1), geometry.strides)) return false;
  geometry.offset = PyLong_AsLongLong(PyTuple_GET_ITEM(wrapper, 2));
  geometry.dtype = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(wrapper, 4))->scalar_type);
  result.num_bytes = static_cast<Geometry>(geometry).num_bytes();
  return true;
}

// The operator of that name, with its overload if it has one; none if PyTorch has none.
std::optional<OperatorHandle> operator_of(PyObject* name) {
  std::string full = PyUnicode_AsUTF8(name), overload;
  const auto dot = full.find('.', full.find("::"));
  if (dot != std::string::npos) {
    overload = full.substr(dot + 1);
    full.resize(dot);
  }
  return c10::Dispatcher::singleton().findSchema({full, overload});
}

// Operators that draw random numbers for dropout alone, and the argument that is its probability.
std::vector<std::pair<OperatorHandle, int>> dropouts;

// The argument that has to be 0 for calls of `op` to be recorded and run here; -1 if there is none.
int dropout_of(const OperatorHandle& op) {
  for (const auto& [other, place] : dropouts)
    if (other == op) return place;
  return -1;
}

bool read_node(PyObject* key, PyObject* call, Known::Content& content) {
  if (Py_TYPE(call) != classes.call || !PyTuple_Check(key)) return false;
  PyObject* op = attribute(call, "op");
  if (op == nullptr) return false;
  content.alike = called(recorded_alike, op);
  const Ref name_of = Ref::taking(PyObject_GetAttrString(op, "name"));
  if (content.alike.get() == Py_None || !name_of) return false;
  const Ref name = called(name_of.get(), nullptr);
  const auto handle = operator_of(name.get());
  PyObject *ops = PyTuple_GET_ITEM(content.alike.get(), 0), *left_out = PyTuple_GET_ITEM(content.alike.get(), 1);
  if (!handle || !read_arguments(handle->schema(), key, call, left_out, content)) return false;
  if (const int dropout = dropout_of(*handle); dropout >= 0) {
    Part& part = content.parts[dropout];
    const bool is_none = (part.kind == Kind::Int && part.number == 0) || part.kind == Kind::Default;
    if (!is_none) return false;
    part.kind = Kind::Default;
    part.value = 0.0;
  }
  PyObject* results = attribute(call, "results");
  content.results.resize(PyTuple_GET_SIZE(results));
  for (size_t place = 0; place < content.results.size(); ++place)
    if (!read_result(handle->schema(), PyTuple_GET_ITEM(results, place), content.results[place])) return false;
  content.returns_list = attribute(call, "returns_list") == Py_True;
  content.is_seeded = attribute(call, "seeded") == Py_True;
  content.key = Ref::to(key);
  content.call = Ref::to(call);
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(ops); ++place)
    content.ops.push_back(PyTuple_GET_ITEM(ops, place));
  return true;
}

// A node that follows another, and the key by which it does.
struct Follower {
  Ref key, node;

  // What the node says, read once: that calls Python. Null without memory.
  Ref known() const {
    PyObject*& slot = slot_of(node.get(), node_slots.known);
    if (is_none(slot)) {
      const Ref call = Ref::to(slot_of(node.get(), node_slots.call));
      auto content = std::make_unique<Known::Content>();
      if (is_none(key.get()) || is_none(call.get()) || !read_node(key.get(), call.get(), *content)) content->ops.clear();
      PyErr_Clear();
      content->depth = PyLong_AsLong(slot_of(node.get(), node_slots.depth));
      auto* made = PyObject_New(Known, &known_type);
      if (made == nullptr) {
        PyErr_Clear();
        return Ref();
      }
      made->content = content.release();
      Py_XDECREF(std::exchange(slot, reinterpret_cast<PyObject*>(made)));
    }
    return Ref::to(slot);
  }

  bool was_read() const { return !is_none(slot_of(node.get(), node_slots.known)); }
};

// The one taken last, if there is any.
std::optional<Follower> latest_after(PyObject* cursor) {
  PyObject* node = slot_of(cursor, node_slots.next);
  if (is_none(node)) return std::nullopt;
  return Follower{Ref::to(slot_of(cursor, node_slots.next_key)), Ref::to(node)};
}

// Some of the others: programs that go on in many ways at one place are compared by Python, which has their keys.
std::vector<Follower> others_after(PyObject* cursor) {
  constexpr size_t kMost = 16;
  std::vector<Follower> found;
  PyObject *branches = slot_of(cursor, node_slots.branches), *key = nullptr, *node = nullptr;
  if (is_none(branches)) return found;
  for (Py_ssize_t place = 0; found.size() < kMost && PyDict_Next(branches, &place, &key, &node);)
    if (node != slot_of(cursor, node_slots.next)) found.push_back({Ref::to(key), Ref::to(node)});
  return found;
}

// ----- comparing a call with a node: changes nothing

struct Entering {
  Ref data, storage;
  PyObject* token;
  int64_t group;
  bool is_new_group;
};

struct Comparison {
  PyObject *context, *epoch, *inputs, *groups;
  c10::Device device;
  Py_ssize_t num_groups;
  std::vector<Entering> entering;
  std::vector<double> constants;
  PyObject *first, *data_of_first;

  bool tensor(const Part& part, const at::Tensor& tensor) {
    PyObject* lazy = lazy_of(tensor);
    if (lazy == nullptr) return false;
    Ref data = lazy == first ? Ref::to(data_of_first) : data_of(lazy);
    if (!data) return false;
    if (slot_of(data.get(), data_slots.epoch) == epoch)
      return part.kind == Kind::Token && slot_of(data.get(), data_slots.token) == part.token;
    for (const Entering& one : entering)
      if (one.data.get() == data.get()) return part.kind == Kind::Token && one.token == part.token;
    return part.kind == Kind::Enter && enters(part, std::move(data));
  }

  // As `record.enter`.
  bool enters(const Part& part, Ref data) {
    if (slot_of(data.get(), data_slots.meta) != part.meta || slot_of(data.get(), data_slots.context) != context)
      return false;
    PyObject* storage = storage_of(data.get());
    if (slot_of(storage, data_slots.meta) != part.base || !is_none(slot_of(storage, data_slots.error))) return false;
    if (slot_of(storage, data_slots.token) == markers.unwritten && is_none(slot_of(storage, data_slots.tensor)))
      return false;
    int64_t group = -1;
    bool is_new_group = false;
    if (PyObject* found = PyDict_GetItemWithError(groups, storage)) {
      group = PyLong_AsLongLong(found);
    } else {
      if (slot_of(storage, data_slots.epoch) == epoch) return false;
      for (const Entering& one : entering)
        if (one.storage.get() == storage) group = one.group;
      is_new_group = group < 0;
      if (is_new_group) group = num_groups;
    }
    const Py_ssize_t index = PyList_GET_SIZE(inputs) + static_cast<Py_ssize_t>(entering.size());
    if (group != part.number || index >= PyList_GET_SIZE(input_tokens)) return false;
    num_groups += is_new_group;
    entering.push_back({std::move(data), Ref::to(storage), PyList_GET_ITEM(input_tokens, index), group, is_new_group});
    return true;
  }

  bool constant(const IValue& value) {
    if (value.isDouble()) {
      constants.push_back(value.toDouble());
    } else if (const at::Tensor* number = wrapped(value, c10::kDouble)) {
      constants.push_back(*static_cast<const double*>(number->const_data_ptr()));
    } else {
      return false;
    }
    return true;
  }

  // A number that PyTorch passes as a tensor, as in `x * 2`: Python gets the number.
  static const at::Tensor* wrapped(const IValue& value, c10::ScalarType dtype) {
    if (!value.isTensor()) return nullptr;
    const at::Tensor& tensor = value.toTensor();
    const bool is_number = tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return is_number && tensor.scalar_type() == dtype && tensor.is_cpu() ? &tensor : nullptr;
  }

  static bool is_absent(const IValue& value) {
    return value.isNone() || (value.isTensor() && !value.toTensor().defined());
  }

  static bool is_default(const IValue& value, const IValue& other) {
    if (other.isNone()) return is_absent(value);
    if (other.isInt()) return value.isInt() && value.toInt() == other.toInt();
    if (other.isBool()) return value.isBool() && value.toBool() == other.toBool();
    if (other.isDouble()) return value.isDouble() && value.toDouble() == other.toDouble();
    if (other.isString()) return value.isString() && value.toStringRef() == other.toStringRef();
    if (!other.isList() || !value.isList()) return false;
    const auto items = value.toListRef(), others = other.toListRef();
    if (items.size() != others.size()) return false;
    for (size_t place = 0; place < items.size(); ++place)
      if (!is_default(items[place], others[place])) return false;
    return true;
  }

  bool same(const Part& part, const IValue& value) {
    switch (part.kind) {
      case Kind::Token:
      case Kind::Enter:
        return value.isTensor() && tensor(part, value.toTensor());
      case Kind::Int:
        if (value.isInt()) return value.toInt() == part.number;
        if (const at::Tensor* number = wrapped(value, c10::kLong))
          return *static_cast<const int64_t*>(number->const_data_ptr()) == part.number;
        return false;
      case Kind::Bool:
        return value.isBool() && value.toBool() == (part.number != 0);
      case Kind::None:
        return is_absent(value);
      case Kind::Float:
        return constant(value);
      case Kind::String:
        if (value.isDevice())
          return part.text == "lazy" && value.toDevice().type() == device.type() &&
                 (!value.toDevice().has_index() || value.toDevice() == device);
        return value.isString() && value.toStringRef() == part.text;
      case Kind::Enumerator:
        return value.isInt() && value.toInt() == part.number;
      case Kind::List: {
        if (!value.isList()) return false;
        const auto items = value.toListRef();
        if (items.size() != part.items.size()) return false;
        for (size_t place = 0; place < items.size(); ++place)
          if (!same(part.items[place], items[place])) return false;
        return true;
      }
      case Kind::Default:
        return is_default(value, part.value);
      case Kind::LeftOut:  // whatever it is, if it asks for no other device and no other layout
        if (value.isDevice())
          return value.toDevice().type() == device.type() &&
                 (!value.toDevice().has_index() || value.toDevice() == device);
        return is_absent(value) || value.isBool() ||
               (value.isInt() && value.toInt() == static_cast<int64_t>(c10::Layout::Strided));
    }
    return false;
  }
};

// ----- recording a known call

const at::Tensor& operand_of(const Result& result, at::ArrayRef<IValue> args) {
  const IValue& argument = args[result.argument];
  return result.item < 0 ? argument.toTensor() : argument.toListRef()[result.item].toTensor();
}

const at::Tensor* first_lazy(at::ArrayRef<IValue> args) {
  for (const IValue& arg : args) {
    if (arg.isTensor()) {
      if (lazy_of(arg.toTensor()) != nullptr) return &arg.toTensor();
    } else if (arg.isTensorList()) {
      const auto items = arg.toListRef();
      if (!items.empty() && lazy_of(items[0].toTensor()) != nullptr) return &items[0].toTensor();
    }
  }
  return nullptr;
}

struct Place {  // of a trace
  PyObject *context, *trace, *cursor;
  Ref changes;  // kept, so that another number is another object

  // None where Python has to look at the call.
  static std::optional<Place> of(PyObject* context) {
    PyObject* found = in_context(context, context_slots.trace);
    if (found == nullptr || !is_none(slot_of(found, trace_slots.unfinished)) ||
        slot_of(found, trace_slots.computed) != Py_False)
      return std::nullopt;
    return Place{context, found, slot_of(found, trace_slots.cursor), Ref::to(slot_of(found, trace_slots.changes))};
  }

  long longest() const { return PyLong_AsLong(slot_of(trace, trace_slots.longest)); }

  bool still_holds() const {
    const auto now = of(context);
    return now && now->trace == trace && now->cursor == cursor && now->changes.get() == changes.get() && !is_locked_elsewhere();
  }

  bool is_locked_elsewhere() const {
    PyObject* lock = in_context(context, context_slots.lock);
    if (lock == nullptr || Py_TYPE(lock) != classes.lock) return true;
    const unsigned long owner = owner_of(lock, owner_slot);
    return owner != 0 && owner != PyThread_get_thread_ident();
  }
};

bool has_usual_dtype(PyObject* trace) {
  PyObject* dtype = slot_of(trace, trace_slots.default_dtype);
  return dtype != nullptr && THPDtype_Check(dtype) &&
         reinterpret_cast<THPDtype*>(dtype)->scalar_type == c10::get_default_dtype_as_scalartype();
}

struct Arrival {  // a call
  const OperatorHandle& op;
  PyObject *python_op, *context;  // what Python has for the operator, which keeps it alive, and for the device
  c10::Device device;
  PyObject *first = nullptr, *data_of_first = nullptr;  // a lazy tensor among the arguments, if there is one
};

struct Match {  // of a call with a node
  Ref known;
  Comparison compared;
};

// Whether a call is the one that `follower` stands for. Python may have been called if not.
std::optional<Match> match(const Arrival& arrival, const Place& place, const Follower& follower,
                           at::ArrayRef<IValue> args) {
  const bool was_read = follower.was_read();
  Ref kept = follower.known();
  if (!kept || (!was_read && !place.still_holds())) return std::nullopt;
  const Known::Content* known = reinterpret_cast<Known*>(kept.get())->content;
  // not the handle: a program may unregister an operator, and another one then has the same address
  if (!known->is_of(arrival.python_op) || known->parts.size() != args.size()) return std::nullopt;
  if (known->depth > place.longest()) return std::nullopt;
  PyObject* groups = slot_of(place.trace, trace_slots.groups);
  Comparison compared{arrival.context, slot_of(place.trace, trace_slots.epoch), slot_of(place.trace, trace_slots.inputs),
                      groups, arrival.device, PyDict_GET_SIZE(groups), {}, {}, arrival.first, arrival.data_of_first};
  for (size_t argument = 0; argument < args.size(); ++argument)
    if (!compared.same(known->parts[argument], args[argument])) return std::nullopt;
  return Match{std::move(kept), std::move(compared)};
}

// See Note [One commit].
bool record_known(const Arrival& arrival, torch::jit::Stack* stack) {
  PyObject* context = arrival.context;
  const size_t num_args = arrival.op.schema().arguments().size();
  const auto args = torch::jit::last(*stack, num_args);
  const auto place = Place::of(context);
  if (!place || !has_usual_dtype(place->trace)) return false;
  const Ref kept_trace = Ref::to(place->trace), kept_cursor = Ref::to(place->cursor);
  std::optional<Follower> follower = latest_after(place->cursor);
  if (!follower) return false;
  auto matched = match(arrival, *place, *follower, args);
  if (!matched)
    for (Follower& other : others_after(place->cursor)) {
      if (!place->still_holds()) return false;
      matched = match(arrival, *place, other, args);
      if (matched) {
        follower = std::move(other);
        break;
      }
    }
  if (!matched) return false;
  const Known::Content* known = reinterpret_cast<Known*>(matched->known.get())->content;
  const Comparison& compared = matched->compared;
  PyObject *epoch = compared.epoch, *groups = compared.groups;

  for (const size_t argument : known->written_lists)  // Python refuses to write inference tensors elsewhere
    for (const IValue& written : args[argument].toListRef())
      if (written.toTensor().is_inference() && !c10::InferenceMode::is_enabled()) return false;

  const size_t num_results = known->results.size();
  c10::SmallVector<at::Tensor, 4> tensors;
  c10::SmallVector<Ref, 4> made;
  tensors.resize(num_results);
  made.resize(num_results);
  std::vector<Ref> constants;
  for (size_t number = 0; number < num_results; ++number) {
    const Result& result = known->results[number];
    if (result.gives == Gives::Nothing) continue;
    if (result.gives == Gives::Same) {
      tensors[number] = operand_of(result, args);
      continue;
    }
    if (result.gives == Gives::Fresh) {
      made[number] = new_data(classes.storage, context, epoch, result.token, result.meta);
      if (!made[number]) return false;
      slot_of(made[number].get(), data_slots.tensor) = Py_NewRef(Py_None);
      slot_of(made[number].get(), data_slots.error) = Py_NewRef(Py_None);
    } else {
      const at::Tensor& of = operand_of(result, args);
      if (of.is_inference() != c10::InferenceMode::is_enabled()) return false;
      const Ref operand = data_of(lazy_of(of));
      made[number] = new_data(classes.view, context, epoch, result.token, result.meta);
      if (!made[number]) return false;
      slot_of(made[number].get(), data_slots.storage) = Py_NewRef(storage_of(operand.get()));
    }
    tensors[number] = lazy_tensor(bare_tensor(result.geometry, result.num_bytes, arrival.device), made[number].get());
    if (!tensors[number].defined()) return false;
  }
  for (const double constant : compared.constants) constants.push_back(Ref::taking(PyFloat_FromDouble(constant)));
  const Ref seed = known->is_seeded ? called(draw_seed, nullptr) : Ref();

  if (!place->still_holds()) {
    if (seed) called(return_seed, seed.get());
    return false;
  }
  // the commit: see the Note
  std::vector<Ref> dropped;
  dropped.reserve(2 * compared.entering.size());
  for (const Entering& one : compared.entering) {
    if (one.is_new_group) {
      const Ref group = Ref::taking(PyLong_FromLongLong(one.group));
      PyDict_SetItem(groups, one.storage.get(), group.get());
    }
    dropped.push_back(put(one.data.get(), data_slots.token, one.token));
    dropped.push_back(put(one.data.get(), data_slots.epoch, epoch));
    PyList_Append(compared.inputs, one.data.get());
  }
  for (const Ref& constant : constants) PyList_Append(slot_of(place->trace, trace_slots.constants), constant.get());
  if (seed) PyList_Append(slot_of(place->trace, trace_slots.seeds), seed.get());
  for (size_t number = 0; number < num_results; ++number)
    if (known->results[number].gives == Gives::Fresh)
      PyList_Append(slot_of(place->trace, trace_slots.pending), made[number].get());
  for (const size_t argument : known->written_lists)  // autograd leaves that to the kernel
    for (const IValue& written : args[argument].toListRef())
      if (!written.toTensor().is_inference()) written.toTensor().unsafeGetTensorImpl()->bump_version();
  // the follower taken last is found first, here and in Python
  const Ref old[] = {put(place->cursor, node_slots.next_key, follower->key.get()),
                     put(place->cursor, node_slots.next, follower->node.get()),
                     put(place->trace, trace_slots.cursor, follower->node.get())};

  torch::jit::drop(*stack, num_args);
  if (known->returns_list) {
    c10::List<at::Tensor> list;
    list.reserve(num_results);
    for (at::Tensor& tensor : tensors) list.push_back(std::move(tensor));
    torch::jit::push(*stack, std::move(list));
  } else {
    for (at::Tensor& tensor : tensors) torch::jit::push(*stack, std::move(tensor));
  }
  ++num_known;
  return true;
}

// Another tensor for the same data, as the handler of `detach` makes it; undefined where Python has to.
at::Tensor shared(const at::Tensor& tensor) {
  PyObject* lazy = lazy_of(tensor);
  if (lazy == nullptr || tensor.is_conj() || tensor.is_neg()) return at::Tensor();
  if (tensor.is_inference() != c10::InferenceMode::is_enabled()) return at::Tensor();
  const Ref data = data_of(lazy);
  if (!data) return at::Tensor();
  const auto* found = tensor.unsafeGetTensorImpl();
  const Geometry geometry{found->sizes(), found->strides(), found->storage_offset(), found->dtype()};
  return lazy_tensor(bare_tensor(geometry, found->unsafe_storage().nbytes(), found->device()), data.get());
}

bool share(torch::jit::Stack* stack) {
  at::Tensor made = shared(torch::jit::peek(*stack, 0, 1).toTensor());
  if (!made.defined()) return false;
  torch::jit::drop(*stack, 1);
  torch::jit::push(*stack, std::move(made));
  ++num_known;
  return true;
}

// ----- copies from the host

constexpr size_t kShortCopy = 1 << 16;  // bytes that are copied sooner than another thread would wake

// Whether a tensor that comes from the host needs no more than to be counted: the beginning of `see_batch`, so that
// Python is not asked for each batch of a step.
bool is_usual(PyObject* context, PyObject* trace, size_t num_bytes) {
  PyObject* cursor = slot_of(trace, trace_slots.cursor);
  const Ref pace = Ref::to(in_context(context, context_slots.pace));
  if (!pace) return false;
  const Ref before = put(pace.get(), pace_slots.came, Py_True);
  if (PyLong_AsLong(slot_of(cursor, node_slots.depth)) == 0) return true;
  const long long room = PyLong_AsLongLong(slot_of(trace, trace_slots.room)) - static_cast<long long>(num_bytes);
  if (room < 0) return false;
  const bool has_gradients = c10::GradMode::is_enabled();
  const bool is_same = slot_of(pace.get(), pace_slots.latest) == cursor;
  const long batches = PyLong_AsLong(slot_of(pace.get(), pace_slots.batches)) + (has_gradients && !is_same);
  const bool is_first = slot_of(pace.get(), pace_slots.over) == slot_of(trace, trace_slots.epoch);
  const Ref left = Ref::taking(PyLong_FromLongLong(room)), counted = Ref::taking(PyLong_FromLong(batches));
  if (!left || !counted) return false;
  if (!is_same && (!has_gradients || is_first || batches >= PyLong_AsLong(most_batches))) return false;
  const Ref old[] = {put(trace, trace_slots.room, left.get()), put(pace.get(), pace_slots.latest, cursor),
                     put(pace.get(), pace_slots.batches, counted.get())};
  return true;
}

void count_transfer(PyObject* name_of_seconds, PyObject* name_of_bytes, std::chrono::steady_clock::time_point begin,
                    size_t num_bytes) {
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const Ref event = Ref::taking(Py_BuildValue("({}{OdOn})", name_of_seconds, seconds.count(), name_of_bytes,
                                              static_cast<Py_ssize_t>(num_bytes)));
  if (event) Ref::taking(PyObject_CallOneArg(add_event, event.get()));
  PyErr_Clear();
}

// Memory that nobody has used takes a copy of `source` as its data: as `copy_from_outside`, on a CPU.
bool upload(torch::jit::Stack* stack) {
  const at::Tensor target = torch::jit::peek(*stack, 0, 3).toTensor();
  const at::Tensor& source = torch::jit::peek(*stack, 1, 3).toTensor();
  constexpr c10::DispatchKeySet unusual{c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                        c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
                                        c10::DispatchKey::ZeroTensor};
  if (!source.defined() || !source.is_cpu() || source.layout() != c10::kStrided || source.is_quantized() ||
      source.key_set().has_any(unusual))
    return false;
  PyObject* lazy = lazy_of(target);
  if (lazy == nullptr || target.numel() == 0 || !target.is_non_overlapping_and_dense()) return false;
  const Ref storage = data_of(lazy);
  const auto is_unused = [&] {
    return Py_TYPE(storage.get()) == classes.storage && is_none(slot_of(storage.get(), data_slots.tensor)) &&
           slot_of(storage.get(), data_slots.token) == markers.unwritten;
  };
  if (!storage || !is_unused()) return false;
  PyObject* context = slot_of(storage.get(), data_slots.context);
  if (target.numel() > 1) {
    const Ref trace = Ref::to(in_context(context, context_slots.trace));
    if (trace && !is_usual(context, trace.get(), target.nbytes())) {
      PyErr_Clear();
      called(see_batch, context, Ref::taking(PyLong_FromSize_t(target.nbytes())).get());
    }
    PyErr_Clear();
  }
  if (!is_unused()) return false;
  const auto backing = device_in(context, context_slots.backing);
  if (!backing || !backing->is_cpu()) return false;

  const auto begin = std::chrono::steady_clock::now();
  at::Tensor base;
  {
    // as `run_clean`: no mode of the thread acts on the copy
    const c10::InferenceMode none(false);
    const c10::impl::ForceDispatchKeyGuard usual(*usual_keys);
    const c10::AutoGradMode without_gradients(false);
    base = at::detail::empty_strided_cpu(target.sizes(), target.strides(), target.scalar_type());
    const WithoutGil others_may_run(base.nbytes() > kShortCopy);
    base.copy_(source);
  }
  const Ref wrapped = Ref::taking(THPVariable_Wrap(base, reinterpret_cast<PyTypeObject*>(THPVariableClass)));
  if (!wrapped || !is_unused()) {
    PyErr_Clear();
    return false;
  }
  const Ref old = put(storage.get(), data_slots.tensor, wrapped.get());
  count_transfer(upload_seconds, upload_bytes, begin, base.nbytes());
  torch::jit::drop(*stack, 3);
  torch::jit::push(*stack, target);
  ++num_known;
  return true;
}

// A lazy tensor over memory that nobody has used. Undefined where Python has to look at the arguments.
at::Tensor unwritten(PyObject* context, c10::Device device, at::ArrayRef<IValue> args, bool is_strided) {
  const auto is_negative = [](int64_t number) { return number < 0; };
  if (!args[0].isIntList() || (is_strided && !args[1].isIntList())) return at::Tensor();
  OwnGeometry geometry;
  geometry.sizes = args[0].toIntVector();
  if (is_strided) {
    geometry.strides = args[1].toIntVector();
  } else {
    geometry.strides.resize(geometry.sizes.size());
    int64_t step = 1;
    for (size_t dim = geometry.sizes.size(); dim-- > 0; step *= std::max<int64_t>(geometry.sizes[dim], 1))
      geometry.strides[dim] = step;
  }
  for (const auto& numbers : {geometry.sizes, geometry.strides})
    if (numbers.size() != geometry.sizes.size() || std::any_of(numbers.begin(), numbers.end(), is_negative))
      return at::Tensor();
  const IValue& dtype = args[is_strided ? 2 : 1];
  geometry.dtype = c10::scalarTypeToTypeMeta(dtype.isNone() ? c10::get_default_dtype_as_scalartype()
                                                            : dtype.toScalarType());
  const Geometry made = geometry;
  const Ref meta = made.meta(), storages = storages_in(context);
  if (!meta) throw_raised();
  const Ref storage = storages ? noted_storage(context, storages.get(), markers.unwritten, meta.get(), Py_None)
                               : called(unwritten_storage, context, meta.get());
  if (!storage || !tell_of_storages(context)) throw_raised();
  return lazy_tensor(bare_tensor(made, made.num_bytes(), device), storage.get());
}

// ----- calls that run at once: see Note [Calls at once in C++]

// The tensor that a Python object of PyTorch's stands for.
at::Tensor tensor_of(PyObject* object) {
  auto* impl = *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(object) + impl_slot);
  return at::Tensor(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::unsafe_reclaim_from_nonowning(impl));
}

struct Running {  // an operator
  bool is_approved = false, is_read = false;
  bool may_leave = false;  // the device, for the host
  int generator = -1;  // the argument that random numbers come from
  int dropout = -1;  // the argument that has to be 0
  std::vector<bool> written;  // by argument
};

// By the operator's object in Python, which Python keeps alive.
const Running& running(const OperatorHandle& op, PyObject* python_op) {
  static auto& known = *new std::unordered_map<PyObject*, Running>;
  const auto found = known.find(python_op);
  if (found != known.end()) return found->second;
  Running made;
  const Ref draws = called(runs_alike, python_op);  // None if C++ may not run it
  made.may_leave = op.schema().name() == "aten::_to_copy";
  made.is_read = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  for (const auto& argument : op.schema().arguments()) {
    if (draws.get() == Py_True && argument.name() == "generator") made.generator = static_cast<int>(made.written.size());
    made.written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  }
  made.dropout = dropout_of(op);
  made.is_approved = draws.get() == Py_False || made.generator >= 0;
  return known.emplace(python_op, std::move(made)).first->second;
}

struct RealCall {
  struct Operand {
    const at::Tensor* lazy;
    at::Tensor real;
    Ref data;
  };
  PyObject* context;
  c10::Device device, backing;
  PyObject *first, *data_of_first;  // of the arrival
  bool may_leave = false, leaves = false;  // whether the result may be, and is a tensor of the host
  std::vector<Operand> operands;
  size_t num_bytes = 0;

  // The real tensor in place of an operand. False where Python has to look.
  bool make_real(const at::Tensor& given, bool is_written, at::Tensor& real) {
    real = given;
    if (!given.defined()) return true;
    PyObject* lazy = lazy_of(given);
    if (lazy == nullptr)  // a number, or a tensor of one element, as eager takes it
      return !is_written && given.dim() == 0 && given.is_cpu() && given.layout() == c10::kStrided &&
             !given.key_set().has(c10::DispatchKey::Python);
    for (const Operand& one : operands)
      if (one.lazy->is_same(given)) {
        real = one.real;
        return true;
      }
    Ref data = lazy == first ? Ref::to(data_of_first) : data_of(lazy);
    if (!data || slot_of(data.get(), data_slots.context) != context || given.is_conj() || given.is_neg()) return false;
    PyObject* storage = storage_of(data.get());
    PyObject* base = slot_of(storage, data_slots.tensor);
    if (is_none(base) || !is_none(slot_of(storage, data_slots.error))) return false;
    real = tensor_of(base);
    if (slot_of(data.get(), data_slots.meta) != slot_of(storage, data_slots.meta)) {
      auto view = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(real.storage()),
                                                       real.key_set(), given.dtype());
      view->set_sizes_and_strides(given.sizes(), given.strides(), given.storage_offset());
      real = at::Tensor(std::move(view));
    }
    num_bytes += given.numel() * given.element_size();
    operands.push_back({&given, real, std::move(data)});
    return true;
  }

  bool make_real(const IValue& given, bool is_written, IValue& real) {
    real = given;
    if (given.isTensor()) {
      at::Tensor made;
      if (!make_real(given.toTensor(), is_written, made)) return false;
      real = std::move(made);
    } else if (given.isTensorList() || given.isOptionalTensorList()) {
      c10::List<at::Tensor> all;
      c10::List<std::optional<at::Tensor>> some;
      for (const IValue& one : given.toListRef()) {
        at::Tensor made;
        if (one.isTensor() && !make_real(one.toTensor(), is_written, made)) return false;
        if (given.isTensorList()) all.push_back(std::move(made));
        else some.push_back(made.defined() ? std::make_optional(std::move(made)) : std::nullopt);
      }
      if (given.isTensorList()) real = std::move(all);
      else real = std::move(some);
    } else if (given.isDevice() && given.toDevice().is_cpu() && may_leave && backing.is_cpu()) {
      leaves = true;
    } else if (given.isDevice()) {
      if (given.toDevice().type() != device.type() || (given.toDevice().has_index() && given.toDevice() != device))
        return false;
      real = backing;
    }
    return !given.isGenerator();
  }

  // The lazy tensor for a result, whose storage is noted if that has memory of its own. Undefined if there is no memory.
  at::Tensor make_lazy(const at::Tensor& real, PyObject* storages) const {
    Ref made;
    const Operand* source = nullptr;
    for (const Operand& one : operands) {
      if (one.real.is_same(real)) {
        TORCH_CHECK(real.sizes() == one.lazy->sizes(), "an operator resized an operand, which was not known of it");
        return *one.lazy;
      }
      if (source == nullptr && real.has_storage() && one.real.is_alias_of(real)) source = &one;
    }
    const bool is_plain = real.layout() == c10::kStrided && real.device() == backing && !real.is_conj() &&
                          !real.is_neg() && !real.is_quantized();
    if (!is_plain || (source == nullptr && real.storage_offset() != 0)) return wrap_in_python(real);
    const Geometry geometry{real.sizes(), real.strides(), real.storage_offset(), real.dtype()};
    const Ref meta = geometry.meta();
    if (!meta) throw_raised();
    if (source != nullptr) {
      made = new_data(classes.view, context, Py_None, Py_None, meta.get());
      if (!made) return at::Tensor();
      slot_of(made.get(), data_slots.storage) = Py_NewRef(storage_of(source->data.get()));
    } else {
      const Ref object = Ref::taking(THPVariable_Wrap(real, reinterpret_cast<PyTypeObject*>(THPVariableClass)));
      if (object) made = noted_storage(context, storages, Py_None, meta.get(), object.get());
      if (!made) return at::Tensor();
    }
    // as in eager, a view of a normal tensor is one in inference mode too
    std::optional<c10::InferenceMode> as_source;
    if (source != nullptr && source->lazy->is_inference() != c10::InferenceMode::is_enabled())
      as_source.emplace(source->lazy->is_inference());
    return lazy_tensor(bare_tensor(geometry, geometry.num_bytes(), device), made.get());
  }

  at::Tensor wrap_in_python(const at::Tensor& real) const {
    const auto object_of = [](const at::Tensor& tensor) {
      return THPVariable_Wrap(tensor, reinterpret_cast<PyTypeObject*>(THPVariableClass));
    };
    const Ref pairs = Ref::taking(PyList_New(0)), result = Ref::taking(object_of(real));
    for (const Operand& one : operands) {
      const Ref pair = Ref::taking(Py_BuildValue("(ON)", lazy_of(*one.lazy), object_of(one.real)));
      if (!pair || !pairs || PyList_Append(pairs.get(), pair.get()) != 0) return at::Tensor();
    }
    const Ref wrapped = result ? Ref::taking(PyObject_CallFunctionObjArgs(wrap_result, context, result.get(),
                                                                           pairs.get(), nullptr)) : Ref();
    return wrapped ? tensor_of(wrapped.get()) : at::Tensor();
  }
};

// Whether the thread is in no mode but perhaps inference mode.
bool has_usual_keys() {
  constexpr c10::DispatchKeySet of_inference{c10::DispatchKey::ADInplaceOrView};
  return (c10::impl::tls_local_dispatch_key_set().included_ | of_inference) == (usual_keys->included_ | of_inference);
}

bool run_at_once(const Arrival& arrival, torch::jit::Stack* stack) {
  const OperatorHandle& op = arrival.op;
  PyObject* context = arrival.context;
  const size_t num_args = op.schema().arguments().size();
  const auto args = torch::jit::last(*stack, num_args);
  if (!storages_in(context)) return false;
  if (arrival.python_op == nullptr || !has_usual_keys()) return false;
  const Running& known = running(op, arrival.python_op);
  const auto backing = device_in(context, context_slots.backing);
  if (!known.is_approved || !backing) return false;
  if (known.dropout >= 0 && !(args[known.dropout].isDouble() && args[known.dropout].toDouble() == 0)) return false;
  if (!backing->is_cpu()) {
    // Python puts a call into order with runs if its thread is on a stream of its own
    const c10::impl::VirtualGuardImpl streams(backing->type());
    if (streams.getStream(*backing) != streams.getDefaultStream(*backing)) return false;
  }
  RealCall call{context, arrival.device, *backing, arrival.first, arrival.data_of_first, known.may_leave};
  Ref drawn;
  if (known.generator >= 0) {
    if (!call.backing.is_cpu() || !args[known.generator].isNone()) return false;
    drawn = called(draw, nullptr);
  }
  const auto give_up = [&] {
    if (drawn) called(take_back, drawn.get());
    return false;
  };
  const Ref storages = storages_in(context);  // Python may have been called
  if (!storages) return give_up();
  call.operands.reserve(4);
  torch::jit::Stack real(num_args);
  for (size_t place = 0; place < num_args; ++place)
    if (!call.make_real(args[place], known.written[place], real[place])) return give_up();
  const auto each_of_written_lists = [&](auto see) {
    for (size_t place = 0; place < num_args; ++place)
      if (known.written[place] && args[place].isTensorList())
        for (const IValue& one : args[place].toListRef()) see(one.toTensor());
  };
  bool is_refused = false;  // Python refuses to write inference tensors elsewhere
  each_of_written_lists([&](const at::Tensor& one) {
    is_refused = is_refused || (one.is_inference() && !c10::InferenceMode::is_enabled());
  });
  if (is_refused) return give_up();
  if (drawn) {
    thread_local at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
    generator.set_current_seed(PyLong_AsUnsignedLongLong(PyTuple_GetItem(drawn.get(), 0)));
    real[known.generator] = generator;
  }
  const auto begin = call.leaves ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
  try {
    std::optional<c10::InferenceMode> none;
    if (c10::InferenceMode::is_enabled()) none.emplace(false);
    const c10::impl::ForceDispatchKeyGuard as_kernel(*kernel_keys);
    const WithoutGil others_may_run(call.num_bytes > kShortCopy);
    op.callBoxed(real);
  } catch (...) {
    give_up();
    throw;
  }
  each_of_written_lists([](const at::Tensor& one) {  // autograd leaves that to the kernel
    if (!one.is_inference()) one.unsafeGetTensorImpl()->bump_version();
  });
  const auto convert = [&](const at::Tensor& result) {
    if (!result.defined() || call.leaves) return result;
    at::Tensor lazy = call.make_lazy(result, storages.get());
    if (!lazy.defined()) throw_raised();
    return lazy;
  };
  for (IValue& result : real) {
    if (result.isTensor()) {
      result = convert(result.toTensor());
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const IValue& one : result.toListRef()) list.push_back(convert(one.toTensor()));
      result = std::move(list);
    }
  }
  torch::jit::drop(*stack, num_args);
  for (IValue& result : real) torch::jit::push(*stack, std::move(result));
  ++num_at_once;
  num_reads += known.is_read || call.leaves;
  if (call.leaves) count_transfer(download_seconds, download_bytes, begin, call.num_bytes);
  if (!tell_of_storages(context)) throw_raised();
  return true;
}

// Whether a call was run, or recorded: nothing has happened otherwise.
bool follow(const Arrival& arrival, torch::jit::Stack* stack) {
  return run_at_once(arrival, stack) || record_known(arrival, stack);
}

bool follow(const OperatorHandle& op, torch::jit::Stack* stack) {
  const at::Tensor* first = first_lazy(torch::jit::last(*stack, op.schema().arguments().size()));
  const Ref lazy = Ref::to(first == nullptr ? nullptr : lazy_of(*first)), data = lazy ? data_of(lazy.get()) : Ref();
  if (!data) return false;
  const Ref context = Ref::to(slot_of(data.get(), data_slots.context));
  return follow({op, op.getPythonOp([]() -> PyObject* { return nullptr; }), context.get(), first->device(), lazy.get(),
                 data.get()}, stack);
}

// Whether nobody watches calls in Python.
bool is_free() {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         PyDict_GetItemWithError(classes.lazy_tensor->tp_dict, names.dispatch) == dispatch_in_python;
}

// ----- what PyTorch asks of each argument

// The attribute of a lazy tensor that PyTorch asks for by a string of C: `__torch_function__`, for each argument of each
// call. Without this function an object of Python's is made of the string each time, which takes 0.1 us. Python itself
// never comes here, and from Python 3.13 on PyTorch does not either.
PyObject* named_attribute(PyObject* lazy, char* name) {
  if (std::strcmp(name, "__torch_function__") == 0) {
    PyObject* found = PyDict_GetItemWithError(Py_TYPE(lazy)->tp_dict, names.function);
    if (found != nullptr && PyCFunction_Check(found)) return Py_NewRef(found);
  }
  const Ref asked = Ref::taking(PyUnicode_InternFromString(name));
  return asked ? Py_TYPE(lazy)->tp_getattro(lazy, asked.get()) : nullptr;
}

// ----- between PyTorch's dispatcher and Python

using c10::impl::PyInterpreterVTable;

// Takes the place of the table of functions by which PyTorch calls Python. All but two are passed on.
struct Between final : PyInterpreterVTable {
  const PyInterpreterVTable* python = nullptr;

  void dispatch(const OperatorHandle& op, torch::jit::Stack* stack) const override {
    {
      const Gil gil;
      if (is_free()) {
        const auto is_among = [&](const auto& ops) { return std::find(ops.begin(), ops.end(), op) != ops.end(); };
        const bool may_upload = copying && *copying == op;
        if (is_among(sharing) ? share(stack) : (may_upload && upload(stack)) || follow(op, stack)) return;
        if (is_among(returning) && lazy_of(torch::jit::peek(*stack, 0, 1).toTensor()) != nullptr) return;
      }
      ++num_others;
    }
    python->dispatch(op, stack);
  }

  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl* self) const override {
    {
      const Gil gil;
      if (is_free()) {
        const auto borrowed = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::
            unsafe_reclaim_from_nonowning(const_cast<c10::TensorImpl*>(self));
        at::Tensor made = shared(at::Tensor(borrowed));
        if (made.defined()) {
          ++num_known;
          return made.unsafeReleaseIntrusivePtr();
        }
      }
    }
    return python->detach(self);
  }

#define PASSED_ON(type, name, parameters, arguments) \
  type name parameters const override { return python->name arguments; }
  PASSED_ON(std::string, name, (), ())
  PASSED_ON(void, incref, (PyObject* object), (object))
  PASSED_ON(void, decref, (PyObject* object), (object))
  PASSED_ON(bool, try_incref, (const c10::impl::PyObjectSlot& slot), (slot))
  PASSED_ON(size_t, refcnt, (PyObject* object), (object))
  PASSED_ON(void, reportErrorCallback, (PyObject* callback, c10::DispatchKey key), (callback, key))
  PASSED_ON(void, python_op_registration_trampoline,
            (const OperatorHandle& op, c10::DispatchKey key, c10::DispatchKeySet keys, torch::jit::Stack* stack,
             bool with_keyset, bool with_op),
            (op, key, keys, stack, with_keyset, with_op))
  PASSED_ON(void, throw_abstract_impl_not_imported_error,
            (std::string op, const char* module, const char* context), (op, module, context))
  PASSED_ON(void, python_dispatcher, (const OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack),
            (op, keys, stack))
  PASSED_ON(bool, is_contiguous, (const c10::TensorImpl* self, at::MemoryFormat format), (self, format))
  PASSED_ON(c10::SymBool, sym_is_contiguous, (const c10::TensorImpl* self, at::MemoryFormat format), (self, format))
  PASSED_ON(bool, is_strides_like, (const c10::TensorImpl* self, at::MemoryFormat format), (self, format))
  PASSED_ON(bool, is_non_overlapping_and_dense, (const c10::TensorImpl* self), (self))
  PASSED_ON(c10::Device, device, (const c10::TensorImpl* self), (self))
  PASSED_ON(int64_t, dim, (const c10::TensorImpl* self), (self))
  PASSED_ON(c10::IntArrayRef, strides, (const c10::TensorImpl* self), (self))
  PASSED_ON(c10::IntArrayRef, sizes, (const c10::TensorImpl* self), (self))
  PASSED_ON(c10::SymIntArrayRef, sym_sizes, (const c10::TensorImpl* self), (self))
  PASSED_ON(c10::Layout, layout, (const c10::TensorImpl* self), (self))
  PASSED_ON(int64_t, numel, (const c10::TensorImpl* self), (self))
  PASSED_ON(c10::SymInt, sym_numel, (const c10::TensorImpl* self), (self))
  PASSED_ON(c10::SymIntArrayRef, sym_strides, (const c10::TensorImpl* self), (self))
  PASSED_ON(c10::SymInt, sym_storage_offset, (const c10::TensorImpl* self), (self))
  PASSED_ON(void, trace_gpu_event_creation, (c10::DeviceType type, uintptr_t event), (type, event))
  PASSED_ON(void, trace_gpu_event_deletion, (c10::DeviceType type, uintptr_t event), (type, event))
  PASSED_ON(void, trace_gpu_event_record, (c10::DeviceType type, uintptr_t event, uintptr_t stream),
            (type, event, stream))
  PASSED_ON(void, trace_gpu_event_wait, (c10::DeviceType type, uintptr_t event, uintptr_t stream),
            (type, event, stream))
  PASSED_ON(void, trace_gpu_memory_allocation, (c10::DeviceType type, uintptr_t place), (type, place))
  PASSED_ON(void, trace_gpu_memory_deallocation, (c10::DeviceType type, uintptr_t place), (type, place))
  PASSED_ON(void, trace_gpu_stream_creation, (c10::DeviceType type, uintptr_t stream), (type, stream))
  PASSED_ON(void, trace_gpu_device_synchronization, (c10::DeviceType type), (type))
  PASSED_ON(void, trace_gpu_stream_synchronization, (c10::DeviceType type, uintptr_t stream), (type, stream))
  PASSED_ON(void, trace_gpu_event_synchronization, (c10::DeviceType type, uintptr_t event), (type, event))
  PASSED_ON(void, reset_backward_hooks, (const c10::TensorImpl* self), (self))
#undef PASSED_ON
};

Between* between = nullptr;  // never dropped: PyTorch calls Python until the process ends

// ----- between PyTorch's dispatcher and Python's kernels on the key Lazy

// Takes the place of such a kernel, and calls it for what is not plain.
struct Before : c10::OperatorKernel {
  Before(const OperatorHandle& op, const OperatorHandle& recorded, PyObject* python_op)
      : python(op.getComputedKernelForDispatchKey(c10::DispatchKey::Lazy)),
        recorded(recorded),
        python_op(Py_NewRef(python_op)) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    {
      const Gil gil;
      if (is_free() && follow(stack)) return;
    }
    python.callBoxed(op, keys, stack);
  }

  virtual bool follow(torch::jit::Stack* stack) const = 0;

  const c10::SafeKernelFunction python;
  const OperatorHandle recorded;  // the operator that calls are recorded as
  PyObject* const python_op;  // for the life of the process
};

struct Factory final : Before {
  Factory(const OperatorHandle& op, const OperatorHandle& recorded, PyObject* python_op)
      : Before(op, recorded, python_op) {
    const auto& arguments = recorded.schema().arguments();
    for (size_t place = 0; place < arguments.size(); ++place) {
      const std::string& name = arguments[place].name();
      if (name == "device") device = place;
      if (name == "layout" || name == "pin_memory" || name == "memory_format") options.push_back(place);
    }
    is_strided = recorded.schema().name() == "aten::empty_strided";
    is_memory = is_strided || recorded.schema().name() == "aten::empty";
  }

  bool follow(torch::jit::Stack* stack) const override {
    const size_t num_args = recorded.schema().arguments().size(), begin = stack->size() - num_args;
    for (const size_t place : options) {
      IValue& option = (*stack)[begin + place];
      const bool is_usual = option.isNone() || (option.isBool() ? !option.toBool() : option.toInt() == 0);
      if (!is_usual) return false;
      option = IValue();  // as Python leaves it out
    }
    IValue& asked = (*stack)[begin + device];
    const bool has_index = asked.isDevice() && asked.toDevice().has_index();
    const Ref index = has_index ? Ref::taking(PyLong_FromLong(asked.toDevice().index())) : Ref::to(Py_None);
    const Ref context = called(made_context, index.get());
    const auto lazy = device_in(context.get(), context_slots.device);
    if (!lazy) return false;
    if (!is_memory) {
      asked = *lazy;
      return ::follow({recorded, python_op, context.get(), *lazy}, stack);
    }
    at::Tensor made = unwritten(context.get(), *lazy, torch::jit::last(*stack, num_args), is_strided);
    if (!made.defined()) return false;
    torch::jit::drop(*stack, num_args);
    torch::jit::push(*stack, std::move(made));
    return true;
  }

  size_t device = 0;
  std::vector<size_t> options;  // the places of those that are the same for all lazy tensors
  bool is_memory, is_strided;
};

// `_copy_from`, which `torch.tensor` calls below Python's dispatch.
struct CopyFrom final : Before {
  using Before::Before;

  bool follow(torch::jit::Stack* stack) const override {
    using torch::jit::peek;
    torch::jit::Stack copy{peek(*stack, 1, 3), peek(*stack, 0, 3), peek(*stack, 2, 3)};
    if (!upload(&copy)) return false;
    torch::jit::drop(*stack, 3);
    torch::jit::push(*stack, std::move(copy[0]));
    return true;
  }
};

// Take the places of kernels: the names of their operators, and of those that are recorded, with Python's objects for
// these.
template <typename Kernel>
void stand_before(PyObject* ops) {
  static auto& registered = *new std::vector<c10::RegistrationHandleRAII>;  // for the life of the process
  struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  for (Py_ssize_t place = 0; place < PyTuple_Size(ops); ++place) {
    PyObject* found = PyTuple_GET_ITEM(ops, place);
    const auto op = operator_of(PyTuple_GET_ITEM(found, 0)), recorded = operator_of(PyTuple_GET_ITEM(found, 1));
    if (op && recorded)
      registered.push_back(c10::Dispatcher::singleton().registerImpl(
          op->operator_name(), c10::DispatchKey::Lazy,
          c10::KernelFunction::makeFromBoxedFunctor<Kernel>(
              std::make_unique<Kernel>(*op, *recorded, PyTuple_GET_ITEM(found, 2))),
          std::nullopt, nullptr, "lazy_backend"));
  }
}

// ----- the module

Slot slot_in(PyObject* type, const char* name) {
  const Ref found = Ref::taking(PyObject_GetAttrString(type, name));
  if (!found) return -1;
  if (Py_TYPE(found.get()) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "%s is no slot", name);
    return -1;
  }
  return reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member->offset;
}

// Where an RLock that nobody holds will have the number of the thread that does.
Slot owner_in(PyObject* lock) {
  std::vector<Slot> places;
  for (Slot place = sizeof(PyObject); place < Py_TYPE(lock)->tp_basicsize; place += sizeof(unsigned long))
    if (owner_of(lock, place) == 0) places.push_back(place);
  const Ref taken = Ref::taking(PyObject_CallMethod(lock, "acquire", nullptr));
  if (!taken) return -1;
  std::erase_if(places, [&](Slot place) { return owner_of(lock, place) != PyThread_get_thread_ident(); });
  const Ref released = Ref::taking(PyObject_CallMethod(lock, "release", nullptr));
  std::erase_if(places, [&](Slot place) { return owner_of(lock, place) != 0; });
  if (released && places.size() != 1) PyErr_SetString(PyExc_TypeError, "an RLock does not tell who holds it");
  return places.size() == 1 ? places[0] : -1;
}

// Where the Python object of a tensor has its TensorImpl.
Slot impl_in_tensors() {
  const at::Tensor tensor = at::detail::empty_strided_cpu({1}, {1}, c10::kFloat);
  const Ref object = Ref::taking(THPVariable_Wrap(tensor, reinterpret_cast<PyTypeObject*>(THPVariableClass)));
  for (Slot place = sizeof(PyObject); object && place < Py_TYPE(object.get())->tp_basicsize; place += sizeof(void*))
    if (slot_of(object.get(), place) == reinterpret_cast<PyObject*>(tensor.unsafeGetTensorImpl())) return place;
  PyErr_SetString(PyExc_TypeError, "a tensor's object does not tell its TensorImpl");
  return -1;
}

template <typename T>
void take(PyObject* given, const char* name, T*& target) {
  PyObject* found = PyDict_GetItemString(given, name);
  if (found == nullptr && PyErr_Occurred() == nullptr) PyErr_Format(PyExc_KeyError, "%s", name);
  target = reinterpret_cast<T*>(Py_XNewRef(found));  // for the life of the process
}

// start(names): take what Python hands over, and stand between the dispatcher and Python from now on.
PyObject* start(PyObject*, PyObject* given) {
  if (between != nullptr) Py_RETURN_NONE;
  take(given, "LazyTensor", classes.lazy_tensor);
  take(given, "LazyStorage", classes.storage);
  take(given, "ViewData", classes.view);
  take(given, "Token", classes.token);
  take(given, "Fresh", classes.fresh);
  take(given, "View", classes.view_result);
  take(given, "Same", classes.same);
  take(given, "Call", classes.call);
  take(given, "DeviceContext", classes.context);
  take(given, "true", markers.is_true);
  take(given, "false", markers.is_false);
  take(given, "float", markers.is_float);
  take(given, "complex", markers.is_complex);
  take(given, "enter", markers.enter);
  take(given, "unwritten", markers.unwritten);
  take(given, "strided", markers.layout);
  PyObject *formats, *shares, *returns, *factories, *copies, *drops, *data, *trace, *pace, *node, *lock;
  take(given, "formats", formats);
  take(given, "shares", shares);
  take(given, "returns", returns);
  take(given, "factories", factories);
  take(given, "copies", copies);
  take(given, "inputs", input_tokens);
  take(given, "dispatch", dispatch_in_python);
  take(given, "recorded_alike", recorded_alike);
  take(given, "draw_seed", draw_seed);
  take(given, "return_seed", return_seed);
  take(given, "TensorData", data);
  take(given, "Trace", trace);
  take(given, "Pace", pace);
  take(given, "TrieNode", node);
  take(given, "see_batch", see_batch);
  take(given, "most_batches", most_batches);
  take(given, "made_context", made_context);
  take(given, "unwritten_storage", unwritten_storage);
  take(given, "add_event", add_event);
  take(given, "upload_seconds", upload_seconds);
  take(given, "upload_bytes", upload_bytes);
  take(given, "download_seconds", download_seconds);
  take(given, "download_bytes", download_bytes);
  take(given, "lock", lock);
  take(given, "runs_alike", runs_alike);
  take(given, "draw", draw);
  take(given, "take_back", take_back);
  take(given, "make_meta", make_meta);
  take(given, "wrap_result", wrap_result);
  take(given, "see_calls", see_calls);
  take(given, "dropouts", drops);
  if (PyErr_Occurred() != nullptr) return nullptr;
  for (size_t format = 0; format < markers.formats.size(); ++format)
    markers.formats[format] = PyTuple_GetItem(formats, static_cast<Py_ssize_t>(format));
  auto* storage = reinterpret_cast<PyObject*>(classes.storage);
  auto* view = reinterpret_cast<PyObject*>(classes.view);
  auto* context = reinterpret_cast<PyObject*>(classes.context);
  data_slots = {slot_in(data, "context"), slot_in(data, "epoch"), slot_in(data, "token"), slot_in(data, "meta"),
                slot_in(storage, "tensor"), slot_in(storage, "error"), slot_in(view, "_storage")};
  trace_slots = {slot_in(trace, "epoch"), slot_in(trace, "cursor"), slot_in(trace, "inputs"),
                 slot_in(trace, "groups"), slot_in(trace, "constants"), slot_in(trace, "seeds"),
                 slot_in(trace, "pending"), slot_in(trace, "computed"), slot_in(trace, "unfinished"), slot_in(trace, "default_dtype"),
                 slot_in(trace, "changes"), slot_in(trace, "longest"), slot_in(trace, "at_once"), slot_in(trace, "room")};
  pace_slots = {slot_in(pace, "latest"), slot_in(pace, "batches"), slot_in(pace, "over"),
                slot_in(pace, "came")};
  node_slots = {slot_in(node, "next_key"), slot_in(node, "next"), slot_in(node, "_branches"), slot_in(node, "call"),
                slot_in(node, "depth"), slot_in(node, "known")};
  context_slots = {slot_in(context, "trace"), slot_in(context, "lock"), slot_in(context, "backing"),
                   slot_in(context, "pace"), slot_in(context, "device")};
  names = {PyUnicode_InternFromString("_data"), PyUnicode_InternFromString("__torch_dispatch__"),
           PyUnicode_InternFromString("__torch_function__")};
  classes.lock = Py_TYPE(lock);
  owner_slot = owner_in(lock);
  for (auto& [names_of, ops] : {std::pair{shares, &sharing}, std::pair{returns, &returning}})
    for (Py_ssize_t place = 0; place < PyTuple_Size(names_of); ++place)
      if (const auto op = operator_of(PyTuple_GET_ITEM(names_of, place))) ops->push_back(*op);
  for (Py_ssize_t one = 0; one < PyTuple_Size(drops); ++one) {
    PyObject* pair = PyTuple_GET_ITEM(drops, one);
    if (const auto op = operator_of(PyTuple_GetItem(pair, 0)))
      dropouts.emplace_back(*op, static_cast<int>(PyLong_AsLong(PyTuple_GetItem(pair, 1))));
  }
  copying = c10::Dispatcher::singleton().findSchema({"aten::copy_", ""});
  usual_keys = c10::impl::tls_local_dispatch_key_set();
  kernel_keys = usual_keys;
  kernel_keys->excluded_ = kernel_keys->excluded_ | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  impl_slot = impl_in_tensors();
  if (PyErr_Occurred() != nullptr) return nullptr;
  auto* interpreter = c10::impl::getGlobalPyInterpreter();
  auto* made = new Between;
  made->python = interpreter->vtable_;
  between = made;
  interpreter->vtable_ = made;
  stand_before<Factory>(factories);
  stand_before<CopyFrom>(copies);
  classes.lazy_tensor->tp_getattr = named_attribute;
  Py_RETURN_NONE;
}

// held_among(objects, holders): as in cpython.py.
PyObject* held_among(PyObject*, PyObject* args) {
  PyObject* objects = nullptr;
  Py_ssize_t holders = 0;
  if (!PyArg_ParseTuple(args, "O!n", &PyList_Type, &objects, &holders)) return nullptr;
  std::vector<Py_ssize_t> places;
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(objects); ++place) {
    PyObject* one = PyList_GET_ITEM(objects, place);
    if (one != Py_None && Py_REFCNT(one) > holders + 1) places.push_back(place);
  }
  const auto size = static_cast<Py_ssize_t>(places.size());
  Ref numbers = Ref::taking(PyTuple_New(size)), held = Ref::taking(PyList_New(size));
  if (!numbers || !held) return nullptr;
  for (Py_ssize_t next = 0; next < size; ++next) {
    PyTuple_SET_ITEM(numbers.get(), next, PyLong_FromSsize_t(places[next]));
    PyList_SET_ITEM(held.get(), next, Py_NewRef(PyList_GET_ITEM(objects, places[next])));
  }
  return Py_BuildValue("NN", numbers.release(), held.release());
}

// counts(): calls that were recorded here, or copied from the host, and those that Python got.
PyObject* counts(PyObject*, PyObject*) { return Py_BuildValue("LL", num_known, num_others); }

// calls(): all calls that came here, and of those that ran at once here, how many needed values.
PyObject* calls(PyObject*, PyObject*) { return Py_BuildValue("LL", num_known + num_others + num_at_once, num_reads); }

PyMethodDef functions[] = {
    {"start", start, METH_O, nullptr},
    {"held_among", held_among, METH_VARARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"calls", calls, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_compiled() {
  known_type.tp_flags = Py_TPFLAGS_DEFAULT;
  known_type.tp_dealloc = drop_known;
  if (PyType_Ready(&known_type) < 0) return nullptr;
  return PyModule_Create(&module);
}
