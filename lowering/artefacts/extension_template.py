"""The C++ around runners: an extension of Python's that takes tensors, runs without the GIL, and gives tensors back.

In: nothing. Out: templates, which `runner_source.py` fills.

Note [Runs beside recording]
A run on the thread that records makes Python wait for it, and one on another thread of Python's has to get the GIL
from a thread that records, twice, which takes longer than a short run. So a runner that leaves nothing to Python also
takes runs as jobs: `begin` posts one to a queue and returns, and a thread that is in `serve`, without the GIL, does it.
Whoever needs the results joins: it waits for the job, and takes them. The thread never needs the GIL: the tensors that
it uses are its own looks at the memory of those that Python holds, since PyTorch takes the GIL to end a tensor that has
an object in Python. It watches the queue for a while before it sleeps, and so does the waiting thread before it does:
waking a thread takes as long as a short run.

A process has one queue and one such thread for all extensions (`run_thread.py`). Whichever extension made the queue is
asked to post and to wait, by address, so that two C++ compilers need not agree on more than `Job` and `Queue`.
"""

from __future__ import annotations

EXTENSION = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

// What is used of PyTorch's C interface. Its headers take longer to compile than all of this.
typedef struct AtenTensorOpaque* AtenTensorHandle;
typedef int32_t AOTITorchError;
extern "C" {{
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle, AtenTensorHandle*);
AOTITorchError aoti_torch_empty_strided(
    int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, AtenTensorHandle*);
AOTITorchError aoti_torch__reinterpret_tensor(
    AtenTensorHandle, int64_t, const int64_t*, const int64_t*, int64_t, AtenTensorHandle*);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle, void**);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle, int64_t**);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle, int64_t**);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_is_defined(AtenTensorHandle, bool*);
AOTITorchError aoti_torch_copy_(AtenTensorHandle, AtenTensorHandle, int32_t);
{declarations}
}}
namespace at {{ int get_num_threads(); }}
extern "C" {{
__attribute__((weak)) void omp_set_num_threads(int);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int);
}}

static PyObject* to_handles;
static PyObject* to_tensors;

static void check(AOTITorchError status) {{
    if (status) throw std::runtime_error({message});
}}
static void drop(AtenTensorHandle& tensor) {{
    AtenTensorHandle freed = tensor;
    tensor = nullptr;
    if (freed) aoti_torch_delete_tensor_object(freed);
}}
static void move(AtenTensorHandle& from, AtenTensorHandle& to) {{
    to = from;
    from = nullptr;
}}
static void share(AtenTensorHandle from, AtenTensorHandle& to) {{
    check(aoti_torch_new_tensor_handle(from, &to));
}}
static void empty(int64_t dim, const int64_t* size, const int64_t* stride, int32_t dtype, AtenTensorHandle& made) {{
    check(aoti_torch_empty_strided(dim, size, stride, dtype, 0, -1, &made));
}}
// `offset`: beyond that of `tensor`.
static void reinterpret(
    AtenTensorHandle tensor, int64_t dim, const int64_t* size, const int64_t* stride, int64_t offset,
    AtenTensorHandle& made) {{
    check(aoti_torch__reinterpret_tensor(tensor, dim, size, stride, offset, &made));
}}
static void* data(AtenTensorHandle tensor) {{
    void* found = nullptr;
    check(aoti_torch_get_data_ptr(tensor, &found));
    return found;
}}
// `dtype`: -1 for any.
static void expect(
    AtenTensorHandle tensor, int64_t dim, const int64_t* size, const int64_t* stride, int32_t dtype) {{
    bool is_defined;
    int32_t has_dtype;
    int64_t has, *sizes, *strides;
    check(aoti_torch_is_defined(tensor, &is_defined));
    if (!is_defined) return;  // an operator's flags said that it need not compute this result
    check(aoti_torch_get_dtype(tensor, &has_dtype));
    check(aoti_torch_get_dim(tensor, &has));
    check(aoti_torch_get_sizes(tensor, &sizes));
    check(aoti_torch_get_strides(tensor, &strides));
    bool agrees = has == dim && (dtype == -1 || dtype == has_dtype);
    for (int64_t i = 0; agrees && i < dim; i++)
        agrees = sizes[i] == size[i] && (size[i] == 1 || strides[i] == stride[i]);
    if (!agrees) throw std::runtime_error("an operator returned another geometry or dtype than its fake version");
}}

// Tensors cross between Python and C++ as capsules of owned handles. Steals `list`.
static bool take(PyObject* list, AtenTensorHandle* handles) {{
    PyObject* capsules = list ? PyObject_CallOneArg(to_handles, list) : nullptr;
    Py_XDECREF(list);
    if (!capsules) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(capsules); i++)
        handles[i] = static_cast<AtenTensorHandle>(PyCapsule_GetPointer(PyList_GET_ITEM(capsules, i), nullptr));
    Py_DECREF(capsules);
    return !PyErr_Occurred();
}}
static PyObject* give(AtenTensorHandle* handles, Py_ssize_t count) {{
    PyObject* capsules = PyList_New(count);
    if (!capsules) return nullptr;
    for (Py_ssize_t i = 0; i < count; i++) {{
        PyObject* capsule = handles[i] ? PyCapsule_New(handles[i], nullptr, nullptr) : Py_NewRef(Py_None);
        if (!capsule) {{ Py_DECREF(capsules); return nullptr; }}
        PyList_SET_ITEM(capsules, i, capsule);
    }}
    PyObject* tensors = PyObject_CallOneArg(to_tensors, capsules);
    Py_DECREF(capsules);
    return tensors;
}}

// Values that an operator refuses, in owned handles, and what says which call it is.
// See Note [Values are checked before writes].
struct Refused {{
    std::vector<AtenTensorHandle> operands;
    std::vector<int64_t> sizes;
    const char* call = nullptr;  // null: nothing was refused
    int64_t place = 0;

    // Sets a Python exception, as `require` does in Python.
    void raise() {{
        std::vector<AtenTensorHandle> all;
        all.swap(operands);
        PyObject* tensors = give(all.data(), all.size());
        PyObject* numbers = tensors ? PyList_New(0) : nullptr;
        for (size_t i = 0; numbers && i < sizes.size(); i++) {{
            PyObject* number = PyLong_FromLongLong(sizes[i]);
            if (!number || PyList_Append(numbers, number)) Py_CLEAR(numbers);
            Py_XDECREF(number);
        }}
        PyObject* values = numbers ? Py_BuildValue("sOOsL", {mark}, tensors, numbers, call, (long long)place) : nullptr;
        if (values) PyErr_SetObject(PyExc_RuntimeError, values);
        Py_XDECREF(tensors);
        Py_XDECREF(numbers);
        Py_XDECREF(values);
    }}
}};
static void require(
    AtenTensorHandle holds, const std::vector<AtenTensorHandle>& operands, std::vector<int64_t> sizes,
    const char* call, int64_t place) {{
    if (*static_cast<const bool*>(data(holds))) return;
    Refused refused{{{{}}, std::move(sizes), call, place}};
    for (AtenTensorHandle operand : operands) {{
        refused.operands.push_back(nullptr);
        share(operand, refused.operands.back());
    }}
    throw refused;
}}

// How many threads operators of this thread use, for a while. What PyTorch has for it holds for later threads, too.
struct Threads {{
    int of_operators = 0, of_mkl = 0;
    explicit Threads(int wanted) {{
        const int now = at::get_num_threads();
        if (!wanted || wanted == now || !omp_set_num_threads) return;
        of_operators = now;
        omp_set_num_threads(wanted);
        if (MKL_Set_Num_Threads_Local) of_mkl = MKL_Set_Num_Threads_Local(wanted);
    }}
    ~Threads() {{
        if (!of_operators) return;
        omp_set_num_threads(of_operators);
        if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(of_mkl);
    }}
}};

// A Python exception is set.
struct Raised {{}};

// What a runner leaves to Python. `state`: of this thread, which is without the GIL before and after.
static void python(
    PyThreadState*& state, PyObject* function, const AtenTensorHandle* given, Py_ssize_t num_given,
    AtenTensorHandle** made, Py_ssize_t num_made) {{
    std::vector<AtenTensorHandle> taken(num_given), found(num_made);
    for (Py_ssize_t i = 0; i < num_given; i++) share(given[i], taken[i]);
    PyEval_RestoreThread(state);
    PyObject* tensors = give(taken.data(), num_given);
    PyObject* results = tensors ? PyObject_CallOneArg(function, tensors) : nullptr;
    Py_XDECREF(tensors);
    if (results && (!PyList_Check(results) || PyList_GET_SIZE(results) != num_made)) {{
        Py_CLEAR(results);
        PyErr_SetString(PyExc_RuntimeError, "an operator returned other results than its schema says");
    }}
    const bool done = take(results, found.data());
    state = PyEval_SaveThread();
    for (Py_ssize_t i = 0; i < num_made; i++) *made[i] = found[i];
    if (!done) throw Raised();
}}

// Tensors of a run: those that are left when an exception comes are freed.
struct Frame {{
    std::vector<AtenTensorHandle> t;
    explicit Frame(Py_ssize_t size) : t(size) {{}}
    ~Frame() {{ clear(); }}
    void clear() {{ for (AtenTensorHandle& tensor : t) drop(tensor); }}
}};

// `num_threads`: how many compute a run; 0 for as many as operators of the thread that asks for it use.
struct Sizes {{ Py_ssize_t num_symbols, num_tensors, num_results, num_slots; int num_threads; }};
// `of`: what the function is of, where that is a sequence of blocks.
using Run = void (*)(
    const void* of, AtenTensorHandle* t, const int64_t* symbols, AtenTensorHandle* results, PyThreadState*& state);
struct Computation {{ Sizes sizes; Run run; const void* of; }};

// One run of a runner: what it takes, and what becomes of it.
struct Task {{
    const Computation& computation;
    const Sizes& sizes;
    Frame frame, results;
    std::vector<int64_t> symbols;
    std::string error;
    Refused refused;
    bool failed = false;

    explicit Task(const Computation& does)
        : computation(does), sizes(does.sizes), frame(sizes.num_slots), results(sizes.num_results),
          symbols(sizes.num_symbols) {{}}

    // Takes one list of arguments, and empties it. False if a Python exception is set.
    // `detaches`: for a run without the GIL.
    bool read(PyObject* arguments, bool detaches) {{
        const Py_ssize_t num_arguments = sizes.num_symbols + sizes.num_tensors;
        if (!PyList_Check(arguments) || PyList_GET_SIZE(arguments) != num_arguments) {{
            PyErr_SetString(PyExc_RuntimeError, "a compiled graph was called with other arguments than it has");
            return false;
        }}
        for (Py_ssize_t i = 0; i < sizes.num_symbols; i++)
            symbols[i] = PyLong_AsLongLong(PyList_GET_ITEM(arguments, i));
        if (PyErr_Occurred()) return false;
        PyObject* tensors = PyList_GetSlice(arguments, sizes.num_symbols, num_arguments);
        if (!take(tensors, frame.t.data()) || PyList_SetSlice(arguments, 0, num_arguments, nullptr)) return false;
        try {{
            if (detaches) detach();
        }} catch (const std::exception& raised) {{
            PyErr_SetString(PyExc_RuntimeError, raised.what());
            return false;
        }}
        return true;
    }}

    // Replaces the tensors by others over the same memory, which no object of Python belongs to: to let go of one that
    // has an object, PyTorch takes the GIL.
    void detach() {{
        for (Py_ssize_t i = 0; i < sizes.num_tensors; i++) {{
            AtenTensorHandle tensor = frame.t[i];
            int64_t dim, *size, *stride;
            check(aoti_torch_get_dim(tensor, &dim));
            check(aoti_torch_get_sizes(tensor, &size));
            check(aoti_torch_get_strides(tensor, &stride));
            reinterpret(tensor, dim, size, stride, 0, frame.t[i]);
            drop(tensor);
        }}
    }}

    // Without the GIL.
    void compute(PyThreadState*& state, int num_threads) {{
        const Threads threads(num_threads);
        try {{
            computation.run(computation.of, frame.t.data(), symbols.data(), results.t.data(), state);
        }} catch (const Raised&) {{
            failed = true;
        }} catch (Refused& values) {{
            failed = true;
            refused = std::move(values);
        }} catch (const std::exception& raised) {{
            failed = true;
            error = raised.what();
        }} catch (...) {{
            failed = true;
            error = "unknown error";
        }}
        frame.clear();
        if (failed) results.clear();
    }}

    PyObject* given() {{
        if (failed) {{
            if (refused.call) refused.raise();
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.c_str());
            return nullptr;
        }}
        std::vector<AtenTensorHandle> all;
        all.swap(results.t);  // `give` takes what it can turn into tensors
        if (all.empty()) return PyList_New(0);  // there are none, or they were given
        return give(all.data(), sizes.num_results);
    }}
}};

static double now() {{
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}}

// Seconds below which a run keeps the GIL: to give it up and to get it back among threads takes as long.
static const double short_run = 3e-5;

// Takes one list of arguments, and empties it. `latest`: seconds that the latest run took, of runs that take equally
// long and leave nothing to Python; else null.
static PyObject* enter(PyObject* arguments, const Computation& computation, std::atomic<double>* latest) {{
    Task task(computation);
    const bool gives_up = !latest || *latest >= short_run;
    if (!task.read(arguments, gives_up)) return nullptr;
    PyThreadState* state = gives_up ? PyEval_SaveThread() : nullptr;
    const double began = now();
    task.compute(state, computation.sizes.num_threads);
    if (latest) *latest = std::min(now() - began, 2 * *latest);  // one that was interrupted says little
    if (gives_up) PyEval_RestoreThread(state);
    return task.given();
}}

// ----- runs as jobs, see Note [Runs beside recording]

// What extensions know of each other's jobs. Each belongs to who posted it and to the queue.
struct Job {{
    void (*compute)(Job*);
    void (*end)(Job*);
    Job* next;
    std::atomic<int> owners;
    std::atomic<bool> done;
}};
static void leave(Job* job) {{
    if (job->owners.fetch_sub(1) == 1) job->end(job);
}}

// Of all extensions; never freed, as its thread may be in it when the process ends.
struct Queue {{
    void (*post)(Queue*, Job*);
    bool (*wait)(Queue*, Job*, double seconds);
}};

// Seconds for which threads ask again and again before they sleep: who waits, as a short run takes, and the queue's, if
// the job before came in that time. To be woken costs who schedules the next run 20 µs.
static const double patience_for_job = 5e-4, patience_for_next = 1e-3;

struct OwnQueue : Queue {{
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t posted = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
    std::atomic<Job*> first{{nullptr}};
    Job* last = nullptr;
    bool is_asleep = false;
    int num_waiting = 0;
    double latest_gap = 0;  // seconds without a job

    OwnQueue() : Queue{{add, wait_for}} {{}}

    static void add(Queue* queue, Job* job) {{
        OwnQueue& own = *static_cast<OwnQueue*>(queue);
        job->next = nullptr;
        pthread_mutex_lock(&own.mutex);
        if (own.first) own.last->next = job;
        else own.first = job;
        own.last = job;
        const bool wakes = own.is_asleep;
        pthread_mutex_unlock(&own.mutex);
        if (wakes) pthread_cond_signal(&own.posted);
    }}

    static bool wait_for(Queue* queue, Job* job, double seconds) {{
        OwnQueue& own = *static_cast<OwnQueue*>(queue);
        for (const double end = now() + std::min(seconds, patience_for_job); now() < end; sched_yield())
            if (job->done) return true;
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        const double time = until.tv_sec + 1e-9 * until.tv_nsec + seconds;
        until.tv_sec = static_cast<time_t>(time);
        until.tv_nsec = static_cast<long>((time - until.tv_sec) * 1e9);
        pthread_mutex_lock(&own.mutex);
        own.num_waiting++;
        while (!job->done && !pthread_cond_timedwait(&own.ended, &own.mutex, &until)) {{}}
        own.num_waiting--;
        pthread_mutex_unlock(&own.mutex);
        return job->done;
    }}

    // The next job, once there is one.
    Job* next() {{
        const double begin = now(), end = latest_gap < patience_for_next ? begin + patience_for_next : begin;
        while (!first && now() < end) sched_yield();
        pthread_mutex_lock(&mutex);
        is_asleep = true;
        while (!first) pthread_cond_wait(&posted, &mutex);
        is_asleep = false;
        latest_gap = now() - begin;
        Job* job = first;
        first = job->next;
        pthread_mutex_unlock(&mutex);
        return job;
    }}

    void serve() {{
        while (true) {{
            Job* job = next();
            job->compute(job);
            pthread_mutex_lock(&mutex);
            job->done = true;
            if (num_waiting) pthread_cond_broadcast(&ended);
            pthread_mutex_unlock(&mutex);
            leave(job);
        }}
    }}
}};

struct OwnJob : Job {{
    Task task;
    Queue* const queue;
    const int num_threads;
    double began = 0, ended = 0;
    std::fenv_t environment;  // such as whether tiny numbers are zeros

    OwnJob(Queue* of, const Computation& computation, int threads)
        : Job{{compute_one, end_one, nullptr, {{2}}, {{false}}}}, task(computation), queue(of), num_threads(threads) {{
        std::fegetenv(&environment);
    }}

    static void compute_one(Job* job) {{
        OwnJob& own = *static_cast<OwnJob*>(job);
        std::fesetenv(&own.environment);
        PyThreadState* none = nullptr;
        own.began = now();
        own.task.compute(none, own.num_threads);
        own.ended = now();
    }}

    static void end_one(Job* job) {{ delete static_cast<OwnJob*>(job); }}
}};

static const char* const of_job = "lazy_backend.job";
static const char* const of_queue = "lazy_backend.queue";

static OwnJob* job_of(PyObject* capsule) {{
    return static_cast<OwnJob*>(static_cast<Job*>(PyCapsule_GetPointer(capsule, of_job)));
}}
static void end_capsule(PyObject* capsule) {{
    leave(job_of(capsule));
}}

// Takes a queue, a list, a list of arguments and how many threads operators use here. Adds a job to the first list, and
// empties the other one; does nothing if there is a job, begun by a call that interrupted the caller.
static PyObject* begin(PyObject* given, const Computation& computation) {{
    PyObject *queue, *jobs, *arguments;
    int num_threads;
    if (!PyArg_ParseTuple(given, "OO!Oi", &queue, &PyList_Type, &jobs, &arguments, &num_threads)) return nullptr;
    Queue* const to = static_cast<Queue*>(PyCapsule_GetPointer(queue, of_queue));
    if (!to) return nullptr;
    const int own_threads = computation.sizes.num_threads;
    OwnJob* job = new OwnJob(to, computation, own_threads ? own_threads : num_threads);
    const bool is_ready = job->task.read(arguments, true);
    if (!is_ready || PyList_GET_SIZE(jobs)) {{
        delete job;
        return is_ready ? Py_NewRef(Py_None) : nullptr;
    }}
    PyObject* capsule = PyCapsule_New(static_cast<Job*>(job), of_job, end_capsule);
    const bool is_added = capsule && !PyList_Append(jobs, capsule);
    if (is_added) to->post(to, job);
    else leave(job);
    if (capsule) Py_DECREF(capsule);
    else leave(job);
    return is_added ? Py_NewRef(Py_None) : nullptr;
}}

// Takes a job and a number of seconds. Returns whether the job is done.
static PyObject* wait(PyObject*, PyObject* given) {{
    PyObject* capsule;
    double seconds;
    if (!PyArg_ParseTuple(given, "Od", &capsule, &seconds)) return nullptr;
    OwnJob* const job = job_of(capsule);
    if (!job) return nullptr;
    bool done = job->done;
    if (done || seconds <= 0) return PyBool_FromLong(done);
    Py_BEGIN_ALLOW_THREADS;
    done = job->queue->wait(job->queue, job, seconds);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(done);
}}

// Takes a job that is done, and an empty list, which gets the results, once. Returns when the job began in seconds
// before now, and the seconds that it took. An exception of the job comes each time.
static PyObject* results(PyObject*, PyObject* given) {{
    PyObject *capsule, *into;
    if (!PyArg_ParseTuple(given, "OO!", &capsule, &PyList_Type, &into)) return nullptr;
    OwnJob* const job = job_of(capsule);
    PyObject* made = job ? job->task.given() : nullptr;
    const bool is_done = made && !PyList_SetSlice(into, 0, 0, made);
    Py_XDECREF(made);
    return is_done ? Py_BuildValue("dd", now() - job->began, job->ended - job->began) : nullptr;
}}

static PyObject* make_queue(PyObject*, PyObject*) {{
    return PyCapsule_New(static_cast<Queue*>(new OwnQueue()), of_queue, nullptr);
}}

// Does the jobs of a queue that this extension has made, and never returns.
static PyObject* serve(PyObject*, PyObject* capsule) {{
    Queue* const queue = static_cast<Queue*>(PyCapsule_GetPointer(capsule, of_queue));
    if (!queue) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    static_cast<OwnQueue*>(queue)->serve();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}}

// Takes the addresses of the kernels, and the functions that are left to Python. Once: they are the same each time.
static PyObject* fill(PyObject* arguments, bool& is_bound, void** kernels, PyObject** functions) {{
    if (is_bound) Py_RETURN_NONE;
    PyObject *addresses, *callables;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyTuple_Type, &addresses, &PyTuple_Type, &callables)) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(addresses); i++)
        kernels[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(callables); i++)
        functions[i] = Py_NewRef(PyTuple_GET_ITEM(callables, i));
    if (PyErr_Occurred()) return nullptr;
    is_bound = true;
    Py_RETURN_NONE;
}}

{products}
{native_calls}
{runners}
// ----- blocks one after the other, see Note [Blocks compiled once]

static const Computation* const blocks[] = {{{computations}}};

// Some of the numbers of eight bytes that a tensor holds.
struct Selection {{
    bool is_made = false, is_range = true;
    std::vector<int64_t> places;

    void of(AtenTensorHandle packed, AtenTensorHandle& made) const {{
        const int64_t size[] = {{static_cast<int64_t>(places.size())}}, stride[] = {{1}};
        if (is_range) return reinterpret(packed, 1, size, stride, places[0], made);
        int32_t dtype;
        check(aoti_torch_get_dtype(packed, &dtype));
        empty(1, size, stride, dtype, made);
        const int64_t* from = static_cast<const int64_t*>(data(packed));
        int64_t* to = static_cast<int64_t*>(data(made));
        for (const int64_t place : places) *to++ = from[place];
    }}
}};

// A result that is copied, as it shares memory or lies otherwise than others rely on.
struct Renewed {{
    int64_t place;
    std::vector<int64_t> stride;

    void renew(AtenTensorHandle& tensor) const {{
        AtenTensorHandle own = nullptr;
        int64_t *size;
        int32_t dtype;
        check(aoti_torch_get_sizes(tensor, &size));
        check(aoti_torch_get_dtype(tensor, &dtype));
        empty(stride.size(), size, stride.data(), dtype, own);
        const AOTITorchError status = aoti_torch_copy_(own, tensor, 0);
        drop(tensor);
        tensor = own;
        check(status);
    }}
}};

// A call of a block. `is_last`: of each input, whether nothing needs it afterwards. -1: a result that nothing needs.
struct BlockCall {{
    const Computation* block;
    std::vector<int64_t> inputs, is_last, outputs;
    Selection scalars, seeds;
    std::vector<Renewed> renewed;
}};

// Values by number are in the slots behind those of the arguments: inputs, then scalars and seeds if there are any.
struct Sequence {{
    std::vector<BlockCall> calls;
    std::vector<int64_t> inputs, outputs;
    bool has_scalars = false, has_seeds = false;
    Computation computation{{}};
}};

static void run_sequence(
    const void* of, AtenTensorHandle* t, const int64_t*, AtenTensorHandle* results, PyThreadState*& state) {{
    const Sequence& sequence = *static_cast<const Sequence*>(of);
    const size_t num_inputs = sequence.inputs.size();
    AtenTensorHandle* const values = t + sequence.computation.sizes.num_tensors;
    const AtenTensorHandle scalars = t[num_inputs];  // if there are any
    const AtenTensorHandle seeds = t[num_inputs + sequence.has_scalars];
    for (size_t i = 0; i < num_inputs; i++) move(t[i], values[sequence.inputs[i]]);
    for (const BlockCall& call : sequence.calls) {{
        Frame frame(call.block->sizes.num_slots), made(call.block->sizes.num_results);
        size_t place = 0;
        for (; place < call.inputs.size(); place++) {{
            AtenTensorHandle& value = values[call.inputs[place]];
            if (call.is_last[place]) move(value, frame.t[place]);
            else share(value, frame.t[place]);
        }}
        if (call.scalars.is_made) call.scalars.of(scalars, frame.t[place++]);
        if (call.seeds.is_made) call.seeds.of(seeds, frame.t[place++]);
        call.block->run(call.block->of, frame.t.data(), nullptr, made.t.data(), state);
        frame.clear();
        for (const Renewed& one : call.renewed) one.renew(made.t[one.place]);
        for (size_t i = 0; i < call.outputs.size(); i++)
            if (call.outputs[i] >= 0) move(made.t[i], values[call.outputs[i]]);
    }}
    for (size_t i = 0; i < sequence.outputs.size(); i++) share(values[sequence.outputs[i]], results[i]);
}}

static std::vector<int64_t> numbers_of(PyObject* tuple) {{
    std::vector<int64_t> found;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
        found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
    return found;
}}
static Selection selection_of(PyObject* places) {{
    Selection made;
    if (places == Py_None) return made;
    made.is_made = true;
    made.places = numbers_of(places);
    for (size_t i = 0; i < made.places.size(); i++)
        if (made.places[i] != made.places[0] + static_cast<int64_t>(i)) made.is_range = false;
    return made;
}}

static const char* const of_sequence = "lazy_backend.sequence";

// Takes the calls, the numbers of the inputs and outputs, how many values there are, and whether there are scalars and
// seeds. A sequence is never freed, as extensions are not.
static PyObject* make_sequence(PyObject*, PyObject* given) {{
    PyObject *calls, *inputs, *outputs;
    Py_ssize_t num_values;
    int has_scalars, has_seeds;
    if (!PyArg_ParseTuple(given, "O!O!O!npp", &PyTuple_Type, &calls, &PyTuple_Type, &inputs, &PyTuple_Type, &outputs,
            &num_values, &has_scalars, &has_seeds)) return nullptr;
    Sequence* const made = new Sequence();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(calls); i++) {{
        PyObject *of_inputs, *is_last, *of_outputs, *scalars, *seeds, *renewed;
        Py_ssize_t block;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(calls, i), "nO!O!O!OOO!", &block, &PyTuple_Type, &of_inputs,
                &PyTuple_Type, &is_last, &PyTuple_Type, &of_outputs, &scalars, &seeds, &PyTuple_Type, &renewed))
            return nullptr;
        made->calls.push_back({{blocks[block], numbers_of(of_inputs), numbers_of(is_last), numbers_of(of_outputs),
                               selection_of(scalars), selection_of(seeds), {{}}}});
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(renewed); j++) {{
            Py_ssize_t place;
            PyObject* stride;
            if (!PyArg_ParseTuple(PyTuple_GET_ITEM(renewed, j), "nO!", &place, &PyTuple_Type, &stride)) return nullptr;
            made->calls.back().renewed.push_back({{place, numbers_of(stride)}});
        }}
    }}
    made->inputs = numbers_of(inputs);
    made->outputs = numbers_of(outputs);
    made->has_scalars = has_scalars;
    made->has_seeds = has_seeds;
    const Py_ssize_t num_tensors = made->inputs.size() + has_scalars + has_seeds;
    const Py_ssize_t num_results = made->outputs.size();
    const int num_threads = made->calls.empty() ? 0 : made->calls[0].block->sizes.num_threads;
    const Py_ssize_t num_slots = num_tensors + num_values + 1;
    made->computation = {{{{0, num_tensors, num_results, num_slots, num_threads}}, run_sequence, made}};
    return PyErr_Occurred() ? nullptr : PyCapsule_New(made, of_sequence, nullptr);
}}
static const Sequence* sequence_of(PyObject* capsule) {{
    return static_cast<const Sequence*>(PyCapsule_GetPointer(capsule, of_sequence));
}}

// As a runner's call and begin, of the sequence that comes first among the arguments.
static PyObject* call_sequence(PyObject*, PyObject* given) {{
    PyObject *capsule, *arguments;
    if (!PyArg_ParseTuple(given, "OO", &capsule, &arguments)) return nullptr;
    const Sequence* const sequence = sequence_of(capsule);
    return sequence ? enter(arguments, sequence->computation, nullptr) : nullptr;
}}
static PyObject* begin_sequence(PyObject*, PyObject* given) {{
    if (!PyTuple_GET_SIZE(given)) {{
        PyErr_SetString(PyExc_TypeError, "no sequence");
        return nullptr;
    }}
    const Sequence* const sequence = sequence_of(PyTuple_GET_ITEM(given, 0));
    PyObject* const others = sequence ? PyTuple_GetSlice(given, 1, PyTuple_GET_SIZE(given)) : nullptr;
    PyObject* const begun = others ? begin(others, sequence->computation) : nullptr;
    Py_XDECREF(others);
    return begun;
}}

static PyMethodDef methods[] = {{
{methods}
    {{"make_sequence", make_sequence, METH_VARARGS, ""}},
    {{"call_sequence", call_sequence, METH_VARARGS, ""}},
    {{"begin_sequence", begin_sequence, METH_VARARGS, ""}},
    {{"make_queue", make_queue, METH_NOARGS, ""}},
    {{"serve", serve, METH_O, ""}},
    {{"wait", wait, METH_VARARGS, ""}},
    {{"results", results, METH_VARARGS, ""}},
    {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "compiled", "{identity}", -1, methods}};
PyMODINIT_FUNC PyInit_compiled(void) {{
    PyObject* conversions = PyImport_ImportModule("{conversions}");
    if (!conversions) return nullptr;
    to_handles = PyObject_GetAttrString(conversions, "unsafe_alloc_void_ptrs_from_tensors");
    to_tensors = PyObject_GetAttrString(conversions, "alloc_tensors_by_stealing_from_void_ptrs");
    Py_DECREF(conversions);
    return to_handles && to_tensors ? PyModule_Create(&definition) : nullptr;
}}
"""

METHODS = """\
    {{"call{place}", runner{place}::call, METH_O, ""}},
    {{"begin{place}", runner{place}::begin_one, METH_VARARGS, ""}},
    {{"bind{place}", runner{place}::bind, METH_VARARGS, ""}},"""

RUNNER = """\
static void* kernels[{num_kernels}];
static PyObject* functions[{num_functions}];
static bool is_bound = false;
static void run(
    const void*, AtenTensorHandle* t, const int64_t* symbols, AtenTensorHandle* results, PyThreadState*& state) {{
    (void)symbols;
    (void)state;
{body}
}}
static const Computation computation = {{
    {{{num_symbols}, {num_tensors}, {num_results}, {num_slots}, {num_threads}}}, run, nullptr}};
static std::atomic<double> latest{{1.0}};
static PyObject* call(PyObject*, PyObject* arguments) {{
    return enter(arguments, computation, {num_symbols} || {num_calls} ? nullptr : &latest);
}}
static PyObject* begin_one(PyObject*, PyObject* arguments) {{
    return begin(arguments, computation);
}}
static PyObject* bind(PyObject*, PyObject* arguments) {{
    return fill(arguments, is_bound, kernels, functions);
}}
"""
