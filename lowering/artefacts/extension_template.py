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
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle, int64_t*);
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
static void expect(AtenTensorHandle tensor, int64_t dim, const int64_t* size, const int64_t* stride) {{
    int64_t has, *sizes, *strides;
    check(aoti_torch_get_dim(tensor, &has));
    check(aoti_torch_get_sizes(tensor, &sizes));
    check(aoti_torch_get_strides(tensor, &strides));
    bool agrees = has == dim;
    for (int64_t i = 0; agrees && i < dim; i++)
        agrees = sizes[i] == size[i] && (size[i] == 1 || strides[i] == stride[i]);
    if (!agrees) throw std::runtime_error("an operator returned another geometry than its fake version");
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
using Run = void (*)(AtenTensorHandle* t, const int64_t* symbols, AtenTensorHandle* results, PyThreadState*& state);

// One run of a runner: what it takes, and what becomes of it.
struct Task {{
    const Sizes sizes;
    Frame frame, results;
    std::vector<int64_t> symbols;
    std::string error;
    bool failed = false;

    explicit Task(const Sizes& of)
        : sizes(of), frame(of.num_slots), results(of.num_results), symbols(of.num_symbols) {{}}

    // Takes one list of arguments, and empties it. False if a Python exception is set.
    bool read(PyObject* arguments) {{
        const Py_ssize_t num_arguments = sizes.num_symbols + sizes.num_tensors;
        if (!PyList_Check(arguments) || PyList_GET_SIZE(arguments) != num_arguments) {{
            PyErr_SetString(PyExc_RuntimeError, "a compiled graph was called with other arguments than it has");
            return false;
        }}
        for (Py_ssize_t i = 0; i < sizes.num_symbols; i++)
            symbols[i] = PyLong_AsLongLong(PyList_GET_ITEM(arguments, i));
        if (PyErr_Occurred()) return false;
        PyObject* tensors = PyList_GetSlice(arguments, sizes.num_symbols, num_arguments);
        return take(tensors, frame.t.data()) && !PyList_SetSlice(arguments, 0, num_arguments, nullptr);
    }}

    // Replaces the tensors by others over the same memory, which no object of Python belongs to.
    void detach() {{
        for (Py_ssize_t i = 0; i < sizes.num_tensors; i++) {{
            AtenTensorHandle tensor = frame.t[i];
            int64_t dim, offset, *size, *stride;
            check(aoti_torch_get_dim(tensor, &dim));
            check(aoti_torch_get_sizes(tensor, &size));
            check(aoti_torch_get_strides(tensor, &stride));
            check(aoti_torch_get_storage_offset(tensor, &offset));
            reinterpret(tensor, dim, size, stride, offset, frame.t[i]);
            drop(tensor);
        }}
    }}

    // Without the GIL.
    void compute(Run run, PyThreadState*& state, int num_threads) {{
        const Threads threads(num_threads);
        try {{
            run(frame.t.data(), symbols.data(), results.t.data(), state);
        }} catch (const Raised&) {{
            failed = true;
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
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.c_str());
            return nullptr;
        }}
        std::vector<AtenTensorHandle> all;
        all.swap(results.t);  // `give` takes what it can turn into tensors
        return give(all.data(), sizes.num_results);
    }}
}};

// Takes one list of arguments, and empties it.
static PyObject* enter(PyObject* arguments, const Sizes& sizes, Run run) {{
    Task task(sizes);
    if (!task.read(arguments)) return nullptr;
    PyThreadState* state = PyEval_SaveThread();
    task.compute(run, state, sizes.num_threads);
    PyEval_RestoreThread(state);
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

// Seconds for which threads ask again and again before they sleep: who waits, as a short run takes, and the queue's,
// as handing out results and scheduling the next run takes.
static const double patience_for_job = 5e-4, patience_for_next = 2e-4;

static double now() {{
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}}

struct OwnQueue : Queue {{
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t posted = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
    std::atomic<Job*> first{{nullptr}};
    Job* last = nullptr;
    bool is_asleep = false;
    int num_waiting = 0;

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
        for (const double end = now() + patience_for_next; !first && now() < end;) sched_yield();
        pthread_mutex_lock(&mutex);
        is_asleep = true;
        while (!first) pthread_cond_wait(&posted, &mutex);
        is_asleep = false;
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
    const Run run;
    Queue* const queue;
    const int num_threads;
    double began = 0, ended = 0;
    std::fenv_t environment;  // such as whether tiny numbers are zeros

    OwnJob(Queue* of, const Sizes& sizes, Run does, int threads)
        : Job{{compute_one, end_one, nullptr, {{2}}, {{false}}}},
          task(sizes), run(does), queue(of), num_threads(threads) {{
        std::fegetenv(&environment);
    }}

    static void compute_one(Job* job) {{
        OwnJob& own = *static_cast<OwnJob*>(job);
        std::fesetenv(&own.environment);
        PyThreadState* none = nullptr;
        own.began = now();
        own.task.compute(own.run, none, own.num_threads);
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
static PyObject* begin(PyObject* given, const Sizes& sizes, Run run) {{
    PyObject *queue, *jobs, *arguments;
    int num_threads;
    if (!PyArg_ParseTuple(given, "OO!Oi", &queue, &PyList_Type, &jobs, &arguments, &num_threads)) return nullptr;
    Queue* const to = static_cast<Queue*>(PyCapsule_GetPointer(queue, of_queue));
    if (!to) return nullptr;
    OwnJob* job = new OwnJob(to, sizes, run, sizes.num_threads ? sizes.num_threads : num_threads);
    bool is_ready = job->task.read(arguments);
    try {{
        if (is_ready) job->task.detach();
    }} catch (const std::exception& raised) {{
        PyErr_SetString(PyExc_RuntimeError, raised.what());
        is_ready = false;
    }}
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

// Takes a job that is done. Returns the results, when it began in seconds before now, and the seconds that it took.
static PyObject* results(PyObject*, PyObject* capsule) {{
    OwnJob* const job = job_of(capsule);
    if (!job) return nullptr;
    PyObject* made = job->task.given();
    return made ? Py_BuildValue("Ndd", made, now() - job->began, job->ended - job->began) : nullptr;
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
{runners}
static PyMethodDef methods[] = {{
{methods}
    {{"make_queue", make_queue, METH_NOARGS, ""}},
    {{"serve", serve, METH_O, ""}},
    {{"wait", wait, METH_VARARGS, ""}},
    {{"results", results, METH_O, ""}},
    {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "compiled", "{identity}", -1, methods}};
PyMODINIT_FUNC PyInit_compiled(void) {{
    PyObject* conversions = PyImport_ImportModule("torch._C._aoti");
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
static void run(AtenTensorHandle* t, const int64_t* symbols, AtenTensorHandle* results, PyThreadState*& state) {{
    (void)symbols;
    (void)state;
{body}
}}
static const Sizes sizes = {{{num_symbols}, {num_tensors}, {num_results}, {num_slots}, {num_threads}}};
static PyObject* call(PyObject*, PyObject* arguments) {{
    return enter(arguments, sizes, run);
}}
static PyObject* begin_one(PyObject*, PyObject* arguments) {{
    return begin(arguments, sizes, run);
}}
static PyObject* bind(PyObject*, PyObject* arguments) {{
    return fill(arguments, is_bound, kernels, functions);
}}
"""
