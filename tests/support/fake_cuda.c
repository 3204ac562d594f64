/* A libcuda.so.1 without a GPU: memory is the process's own, work is done when it is queued, and kernels are run by
   functions of fake_gpu.py. It refuses what a driver would: memory that was not allocated, shared memory that was not
   granted, anything but launches during a capture, calls of a thread without a context. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORTED __attribute__((visibility("default")))
#define OK CUDA_SUCCESS
#define REFUSE(error, ...) return fprintf(stderr, "fake CUDA: " __VA_ARGS__), fputc('\n', stderr), CUDA_ERROR_##error
#define NEED_CONTEXT() do { if (!depth) REFUSE(INVALID_CONTEXT, "%s: the thread has no context", __func__); } while (0)
#define NEED_NO_CAPTURE(s) do { if (captures(s)) { (s)->is_broken = 1; \
    REFUSE(STREAM_CAPTURE_UNSUPPORTED, "%s during a capture", __func__); } } while (0)
#define MAX_PARAMS 512

/* Of Python: runs a kernel, and writes the bytes of each parameter, whose number it returns. */
typedef int (*run_t)(int program, const unsigned *sizes, unsigned shared, void **params);
typedef int (*params_t)(int program, unsigned *sizes);
static run_t run_kernel;
static params_t params_of;
EXPORTED void fake_set(run_t run, params_t params) { run_kernel = run, params_of = params; }

typedef struct Block { char *start; size_t size; int gpu; struct Block *next; } Block;
typedef struct Kernel { int program; unsigned granted; } Kernel; /* the library has one kernel */
typedef struct Node { Kernel *kernel; unsigned sizes[6], shared; void **params; int is_early; struct Node *next; } Node;
typedef struct Graph { Node *first, *last; size_t count; } Graph;
struct CUstream_st { Graph *capture; int is_broken, gpu; };
struct CUevent_st { double ms; };
struct CUctx_st { int unused; };
static struct CUctx_st contexts_of[8]; /* of GPUs */
static __thread CUcontext contexts[16];
static __thread int depth;
static Block *blocks;
static size_t used;
static const size_t total = 8ul << 30;

static int number(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }
static int gpu(void) { return contexts[depth - 1] - contexts_of; } /* of the thread's context */
static int capability(void) { return number("FAKE_CUDA_CC", 90); }
static int captures(CUstream s) { return (unsigned long)s > 2 && s->capture; } /* up to 2: streams of every program */
static int most_shared(void) { /* KiB of a block: CUDA C++ Programming Guide, "Technical Specifications" */
    switch (capability()) {
    case 75: return 64 << 10;
    case 80: case 87: return 163 << 10;
    case 86: case 89: case 120: case 121: return 99 << 10;
    default: return 227 << 10;
    }
}

CUresult cuInit(unsigned flags) { return OK; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, OK; }
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "an error of the fake driver", OK; }
CUresult cuGetErrorName(CUresult error, const char **text) {
    static __thread char name[32];
    return snprintf(name, sizeof name, "CUDA_ERROR_%d", error), *text = name, OK;
}
CUresult cuDeviceGetCount(int *count) { return *count = number("FAKE_CUDA_GPUS", 1), OK; }
CUresult cuDeviceGet(CUdevice *device, int n) {
    return *device = n, n < number("FAKE_CUDA_GPUS", 1) ? OK : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    return snprintf(name, size, "fake GPU %d", device), OK;
}
CUresult cuDeviceGetUuid(CUuuid *id, CUdevice device) { return memset(id, 7 + device, sizeof *id), OK; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return *value = capability() / 10, OK;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return *value = capability() % 10, OK;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return *value = number("FAKE_CUDA_SMS", 4), OK;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return *value = 32, OK;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return *value = most_shared(), OK;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return *value = 1, OK;
    default: return *value = 0, OK;
    }
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return *context = &contexts_of[device], OK;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return OK; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = depth ? contexts[depth - 1] : NULL, OK; }
CUresult cuCtxSetCurrent(CUcontext context) { return depth += !depth, contexts[depth - 1] = context, OK; }
CUresult cuCtxPushCurrent(CUcontext context) { return contexts[depth++] = context, OK; }
CUresult cuCtxPopCurrent(CUcontext *context) { NEED_CONTEXT(); return *context = contexts[--depth], OK; }
CUresult cuCtxGetDevice(CUdevice *device) { NEED_CONTEXT(); return *device = gpu(), OK; }

/* Memory begins as NaN. */
static Block *block_at(CUdeviceptr at) {
    for (Block *b = blocks; b; b = b->next)
        if ((char *)at >= b->start && (char *)at < b->start + b->size) return b;
    return NULL;
}
static int holds(CUdeviceptr at, size_t size) {
    Block *b = block_at(at);
    return !size || (b && (char *)at + size <= b->start + b->size);
}
EXPORTED int fake_blocks(unsigned long *found, int most) { /* pairs of address and bytes */
    int n = 0;
    for (Block *b = blocks; b && n < most; b = b->next, n++)
        found[2 * n] = (unsigned long)b->start, found[2 * n + 1] = b->size;
    return n;
}
CUresult cuMemGetInfo(size_t *left, size_t *all) { NEED_CONTEXT(); return *left = total - used, *all = total, OK; }
CUresult cuMemAlloc(CUdeviceptr *at, size_t size) {
    NEED_CONTEXT();
    if (!size) REFUSE(INVALID_VALUE, "cuMemAlloc of 0 bytes");
    if (used + size > total) return CUDA_ERROR_OUT_OF_MEMORY;
    Block *b = malloc(sizeof *b);
    size_t whole = (size + 511) / 256 * 256;
    if (posix_memalign((void **)&b->start, 512, whole)) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(b->start, 0xFF, whole);
    b->size = size, b->gpu = gpu(), b->next = blocks, blocks = b, used += size;
    return *at = (CUdeviceptr)b->start, OK;
}
CUresult cuMemFree(CUdeviceptr at) {
    NEED_CONTEXT();
    for (Block **b = &blocks; *b; b = &(*b)->next)
        if ((CUdeviceptr)(*b)->start == at) {
            Block *gone = *b;
            *b = gone->next, used -= gone->size;
            return free(gone->start), free(gone), OK;
        }
    REFUSE(INVALID_VALUE, "cuMemFree of what was not allocated");
}
static CUresult copy(void *to, const void *from, size_t size, CUdeviceptr ours, CUstream s) {
    NEED_CONTEXT();
    NEED_NO_CAPTURE(s);
    if (!holds(ours, size)) REFUSE(INVALID_VALUE, "a copy of %zu bytes that are not there", size);
    if (size && block_at(ours)->gpu != gpu()) REFUSE(INVALID_VALUE, "a copy of another GPU's memory");
    return memcpy(to, from, size), OK;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream s) {
    return copy((void *)to, from, size, to, s);
}
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream s) {
    return copy(to, (void *)from, size, from, s);
}
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t size, CUstream s) {
    NEED_CONTEXT();
    NEED_NO_CAPTURE(s);
    if (!holds(at, size)) REFUSE(INVALID_VALUE, "cuMemsetD8 of %zu bytes that are not there", size);
    return memset((void *)at, value, size), OK;
}

CUresult cuStreamCreate(CUstream *s, unsigned flags) {
    NEED_CONTEXT();
    return *s = calloc(1, sizeof **s), (*s)->gpu = gpu(), OK;
}
CUresult cuStreamDestroy(CUstream s) { return free(s), OK; }
CUresult cuStreamSynchronize(CUstream s) { NEED_NO_CAPTURE(s); return OK; }
CUresult cuStreamWaitEvent(CUstream s, CUevent event, unsigned flags) { NEED_NO_CAPTURE(s); return OK; }
CUresult cuEventCreate(CUevent *e, unsigned flags) { NEED_CONTEXT(); return *e = calloc(1, sizeof **e), OK; }
CUresult cuEventDestroy(CUevent event) { return free(event), OK; }
CUresult cuEventSynchronize(CUevent event) { return OK; }
CUresult cuEventRecord(CUevent event, CUstream s) {
    NEED_NO_CAPTURE(s);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return event->ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6, OK;
}
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) {
    if (!from->ms || !to->ms) REFUSE(INVALID_HANDLE, "an event that was not recorded");
    return *ms = to->ms - from->ms, OK;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *a, void **b, unsigned c,
                           CUlibraryOption *d, void **e, unsigned f) {
    Kernel *k = calloc(1, sizeof *k);
    return k->program = atoi(code), *library = (CUlibrary)k, OK;
}
CUresult cuLibraryUnload(CUlibrary library) { return OK; }
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    return *kernel = (CUkernel)library, OK;
}
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_NOT_SUPPORTED;
    if (value > most_shared()) REFUSE(INVALID_VALUE, "a block has no %d bytes of shared memory", value);
    return ((Kernel *)kernel)->granted = value, OK;
}
CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
    return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, OK;
}

static CUresult queue(Kernel *k, CUstream s, Node node, void **params) {
    unsigned *sizes = node.sizes, bytes[MAX_PARAMS], most = 65535;
    int count = params_of(k->program, bytes);
    NEED_CONTEXT();
    if ((unsigned long)s > 2 && s->gpu != gpu()) REFUSE(INVALID_VALUE, "a launch on another GPU's stream");
    if (!(sizes[0] && sizes[1] && sizes[2]) || sizes[1] > most || sizes[2] > most || sizes[3] > 1024)
        REFUSE(INVALID_VALUE, "a grid or block of another size than a GPU runs");
    if (node.shared > 48 << 10 && node.shared > k->granted)
        REFUSE(INVALID_VALUE, "%u bytes of shared memory that were not granted", node.shared);
    if (!captures(s)) return run_kernel(k->program, sizes, node.shared, params);
    Node *kept = malloc(sizeof *kept);
    *kept = node, kept->kernel = k, kept->params = calloc(count + 1, sizeof(void *));
    for (int i = 0; i < count; i++) kept->params[i] = memcpy(malloc(bytes[i]), params[i], bytes[i]);
    Graph *g = s->capture;
    if (g->last) g->last->next = kept; else g->first = kept;
    return g->last = kept, g->count++, OK;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream s, void **params, void **extra) {
    return queue((Kernel *)f, s, (Node){.sizes = {gx, gy, gz, bx, by, bz}, .shared = shared}, params);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
    return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                          c->sharedMemBytes, c->hStream, params, extra);
}

/* A graph is a chain. is_early: the node's edge is programmatic; -1: it was removed. */
CUresult cuStreamBeginCapture(CUstream s, CUstreamCaptureMode mode) {
    if ((unsigned long)s < 3 || s->capture) REFUSE(ILLEGAL_STATE, "a capture that cannot begin");
    return s->capture = calloc(1, sizeof(Graph)), s->is_broken = 0, OK;
}
CUresult cuStreamEndCapture(CUstream s, CUgraph *graph) {
    *graph = (CUgraph)s->capture, s->capture = NULL;
    return s->is_broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : OK;
}
CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edges, size_t *count) {
    Graph *g = (Graph *)graph;
    size_t i = 0;
    if (from)
        for (Node *n = g->first; n && n->next; n = n->next, i++) {
            from[i] = (CUgraphNode)n, to[i] = (CUgraphNode)n->next;
            memset(&edges[i], 0, sizeof edges[i]);
        }
    return *count = g->count ? g->count - 1 : 0, OK;
}
CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *edges, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (((Node *)from[i])->next != (Node *)to[i]) REFUSE(INVALID_VALUE, "an edge that is not there");
        ((Node *)to[i])->is_early = -1;
    }
    return OK;
}
CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                const CUgraphEdgeData *edges, size_t count) {
    for (size_t i = 0; i < count; i++) {
        int is_early = edges[i].type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
        Node *n = (Node *)to[i];
        if (((Node *)from[i])->next != n || n->is_early != -1) REFUSE(INVALID_VALUE, "an edge that is there");
        if (is_early && (capability() < 90 || edges[i].from_port != CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC))
            REFUSE(NOT_SUPPORTED, "an edge of a later GPU");
        n->is_early = is_early;
    }
    return OK;
}
CUresult cuGraphInstantiate(CUgraphExec *executable, CUgraph graph, unsigned long long flags) {
    Graph *copied = malloc(sizeof *copied);
    *copied = *(Graph *)graph;
    for (Node *n = copied->first; n; n = n->next)
        if (n->is_early < 0) REFUSE(INVALID_VALUE, "a kernel without its edge");
    return *executable = (CUgraphExec)copied, OK;
}
CUresult cuGraphDestroy(CUgraph graph) { return free(graph), OK; }
CUresult cuGraphExecDestroy(CUgraphExec executable) { return free(executable), OK; }
CUresult cuGraphLaunch(CUgraphExec executable, CUstream s) {
    NEED_NO_CAPTURE(s);
    CUresult error = OK;
    for (Node *n = ((Graph *)executable)->first; n && !error; n = n->next)
        error = run_kernel(n->kernel->program, n->sizes, n->shared, n->params);
    return error;
}

/* Symbols by their plain names: cuda.h gives a later version's suffix to some. */
static CUresult absent(void) { REFUSE(NOT_SUPPORTED, "a function that the fake driver lacks"); }
CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    static const char *suffixes[] = {"_v4", "_v3", "_v2", ""};
    Dl_info ours, found;
    dladdr((void *)absent, &ours);
    void *self = dlopen(ours.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = (void *)absent;
    for (int i = 0; i < 4; i++) {
        char name[256];
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]);
        void *f = dlsym(self, name);
        if (f && dladdr(f, &found) && found.dli_fbase == ours.dli_fbase) { *function = f; break; }
    }
    if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return OK;
}
