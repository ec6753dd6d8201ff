/* The parts of a call that would take Python too long: the key by which a call, or a kernel's
   compiled form, is known, and the launch of a kernel by CUDA's driver.

   A launch of Triton asks the driver about every address and makes an object of Python for every
   TMA descriptor. A `Form` reads the same arguments, encodes descriptors where the kernel's
   parameters are put together, and launches. CUDA's header is not needed: what is used of it is
   declared here, and the driver's functions are looked up by name. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

/* CUDA's driver */

typedef struct {
    uint64_t id; /* CUlaunchAttributeID, padded */
    unsigned value[16];
} Attribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned number;
} Config;

enum { COOPERATIVE = 2, CLUSTER = 4, SPREAD = 5, AFTER_PREVIOUS = 6 }; /* ids of attributes */
enum { PROMOTE_128 = 2, FILL_ZERO = 0, FILL_NAN = 1 };
enum { MAP_BYTES = 128, MAX_RANK = 5, MAX_PARAMETERS = 512, MAX_BYTES = 16384,
       MAX_PATCHES = 64, MAX_TENSORS = 32 };

/* See `ragged.py`. */
static const int64_t FAR = 1LL << 30, ANY = (1LL << 31) - (1 << 16), BACK = 1LL << 34;

static struct {
    int (*launch)(const Config *, void *, void **, void **);
    int (*encode)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *,
                  const uint32_t *, const uint32_t *, int, int, int, int);
    int (*parameter)(void *, size_t, size_t *, size_t *);
    int (*context)(void **);
    int (*set_context)(void *);
    int (*retain)(void **, int);
    int (*message)(int, const char **);
    int (*version)(int *);
} cuda;
static int driver_version;

static PyObject *data_ptr, *base, *shape, *strides, *stride, *padding, *dtype, *get_device,
    *requires_grad, *is_neg, *calls, *enter_hook, *exit_hook, *zero, *block_shape,
    *layout, *value, *number_name;
static PyObject *tensor, *parameter, *function, *constant, *watchers, *is_grad_enabled,
    *place_type; /* see `prepare` */

/* Whether all went well; else Python's error says what the driver said. */
static int checked(int error, const char *what) {
    const char *text = NULL;
    if (!error)
        return 1;
    cuda.message(error, &text);
    PyErr_Format(PyExc_RuntimeError, "CUDA's driver refused %s: %s", what, text ? text : "?");
    return 0;
}

/* A number of Python without an error for what does not fit: its lowest 64 bits. */
static uint64_t bits_of(PyObject *x) {
    return PyLong_AsUnsignedLongLongMask(x);
}

/* The address of a tensor, an address, or None; an error is Python's. */
static uint64_t address_of(PyObject *x) {
    if (x == Py_None)
        return 0;
    if (PyLong_Check(x))
        return bits_of(x);
    PyObject *found = PyObject_CallMethodNoArgs(x, data_ptr);
    if (!found)
        return 0;
    uint64_t address = bits_of(found);
    Py_DECREF(found);
    return address;
}

/* A number that x has, by its name; -1: an error. */
static int64_t number_of(PyObject *x, PyObject *name, int is_method) {
    PyObject *found = is_method ? PyObject_CallMethodNoArgs(x, name) : PyObject_GetAttr(x, name);
    if (!found)
        return -1;
    int64_t number = PyLong_Check(found) ? (int64_t)bits_of(found) : PyObject_IsTrue(found);
    Py_DECREF(found);
    return number;
}

/* Forms */

typedef struct {
    char kind;       /* S: no parameter, T: a tuple, D: a descriptor, else a format of `struct` */
    int count;       /* parts of a tuple, which follow; dimensions of a descriptor */
    int type, swizzle, bytes; /* of a descriptor's elements */
    uint32_t box[MAX_RANK];   /* the innermost dimension first, as CUDA has them */
} Slot;

typedef struct {
    PyObject_HEAD
    void *function;
    int num_ctas, num_slots;
    Config config;
    Attribute attributes[4];
    Slot *slots;
    int num_parameters, device;
    PyObject *number, *stream_of, *hooks, *otherwise; /* number: of the device, as an object */
} Form;

/* A parameter that holds the address of a tensor of `Steps`, or its map. */
typedef struct {
    int tensor, fill;
    size_t place;
    const Slot *map; /* NULL: an address */
    int64_t sizes[MAX_RANK], steps[MAX_RANK];
} Patch;

typedef struct {
    Form *form;
    int slot, parameters;
    size_t used; /* bytes */
    Patch *patches; /* NULL if arguments are tensors */
    int num_patches;
    void *pointers[MAX_PARAMETERS];
    _Alignas(MAP_BYTES) char memory[MAX_BYTES];
} Launch;

/* Memory for the next parameter of a launch. */
static void *next(Launch *launch, size_t bytes) {
    if (launch->parameters == MAX_PARAMETERS || launch->used + bytes > MAX_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a kernel has too many parameters");
        return NULL;
    }
    void *place = launch->memory + launch->used;
    launch->pointers[launch->parameters++] = place;
    launch->used += bytes;
    return place;
}

/* Read whole numbers, so many; a sequence of Python, which is given away. */
static int read_numbers(PyObject *given, int64_t *numbers, int most, int *count) {
    PyObject *found = given ? PySequence_Tuple(given) : NULL;
    Py_XDECREF(given);
    if (!found)
        return 0;
    *count = PyTuple_GET_SIZE(found);
    for (int i = 0; i < *count && *count <= most; i++)
        numbers[i] = bits_of(PyTuple_GET_ITEM(found, i));
    Py_DECREF(found);
    return !PyErr_Occurred() && *count <= most;
}

/* The shape and the strides of the descriptor of a tensor (batch, length, heads, dim), or without
   a batch, by its own: as `tma.box_steps` has them; of five dimensions, as `ragged.ragged_steps`. */
static int read_steps(PyObject *boxed, int rank, int64_t *sizes, int64_t *steps) {
    int64_t given[4] = {1, 1, 1, 1}, strides[4] = {16, 16, 16, 16};
    int dims, count;
    PyObject *found = PyTuple_GET_ITEM(boxed, 2);
    int missing = PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 3;
    if (!read_numbers(Py_NewRef(found), given + missing, 4 - missing, &dims) ||
        !read_numbers(Py_NewRef(PyTuple_GET_ITEM(boxed, 3)), strides + missing, 4 - missing, &count))
        return 0;
    int64_t batch = given[0], length = given[1], heads = given[2], dim = given[3];
    int64_t row = length == 1 ? 16 : strides[1], head = heads == 1 ? 16 : strides[2];
    if (rank == 4) {
        memcpy(sizes, (int64_t[]){batch, heads, length, dim}, 32);
        memcpy(steps, (int64_t[]){batch == 1 ? 16 : strides[0], head, row, 1}, 32);
        return 1;
    }
    if ((batch == 1 ? length : strides[0] / strides[1] * batch) > FAR) {
        PyErr_SetString(PyExc_ValueError, "rows are too many; 2^30 are possible.");
        return 0;
    }
    memcpy(sizes, (int64_t[]){ANY, ANY, heads, FAR, dim}, 40);
    memcpy(steps, (int64_t[]){BACK - row, row, head, row, 1}, 40);
    return 1;
}

/* Encode a map of TMA as Triton does. */
static int encode(const Slot *slot, void *map, uint64_t address, const int64_t *sizes,
                  const int64_t *steps, int fill) {
    uint64_t dims[MAX_RANK], bytes[MAX_RANK];
    double last = 0; /* byte; boxes of sequences reach past 2^64 */
    uint32_t ones[MAX_RANK] = {1, 1, 1, 1, 1};
    int rank = slot->count;
    for (int i = 0; i < rank; i++) {
        dims[i] = sizes[rank - 1 - i];
        bytes[i] = slot->bytes * (i + 1 < rank ? steps[rank - 2 - i] : 0);
        last += (double)(dims[i] - 1) * (i ? bytes[i - 1] : (uint64_t)slot->bytes);
    }
    if (!checked(cuda.encode(map, slot->type, rank, (void *)address, dims, bytes, slot->box, ones,
                             0, slot->swizzle, PROMOTE_128, fill), "a TMA descriptor"))
        return 0;
    /* Drivers up to 13.1 encode tensors below 128 KiB wrongly; CUTLASS and Triton correct it. */
    if (driver_version <= 13010 && last + 1 < 128 * 1024)
        ((uint64_t *)map)[1] &= ~((uint64_t)1 << 21);
    return 1;
}

/* The address of an argument; if it is a place of `Steps`, any, and a patch for later. */
static uint64_t address_in(Launch *launch, PyObject *x, Patch patch) {
    if (!launch->patches || !PyObject_TypeCheck(x, (PyTypeObject *)place_type))
        return address_of(x);
    patch.tensor = (int)number_of(x, number_name, 0);
    if (launch->num_patches == MAX_PATCHES)
        PyErr_SetString(PyExc_ValueError, "a kernel has too many tensors");
    else
        launch->patches[launch->num_patches++] = patch;
    return MAP_BYTES;
}

/* Add the parameters of a descriptor: its map, its shape, its strides. It is one of Triton or
   Gluon, or (box, tensor, shape, strides), see `tma.Box`. */
static int add_descriptor(Launch *launch, const Slot *slot, PyObject *x) {
    int64_t sizes[MAX_RANK], steps[MAX_RANK];
    int fill = FILL_ZERO, rank = slot->count, dims = rank, count = rank;
    PyObject *of = NULL;
    launch->used = (launch->used + MAP_BYTES - 1) / MAP_BYTES * MAP_BYTES;
    void *map = next(launch, MAP_BYTES);
    if (!map)
        return 0;
    if (PyTuple_CheckExact(x) && PyTuple_GET_SIZE(x) == 4) {
        of = Py_NewRef(PyTuple_GET_ITEM(x, 1));
        if (!read_steps(x, rank, sizes, steps))
            goto failed;
    } else {
        PyObject *padded = PyObject_GetAttr(x, padding);
        int same = padded ? PyObject_RichCompareBool(padded, zero, Py_EQ) : -1;
        Py_XDECREF(padded);
        fill = same ? FILL_ZERO : FILL_NAN;
        if (same < 0 || !(of = PyObject_GetAttr(x, base)) ||
            !read_numbers(PyObject_GetAttr(x, shape), sizes, rank, &dims) ||
            !read_numbers(PyObject_GetAttr(x, strides), steps, rank, &count))
            goto failed;
    }
    if (dims != rank || count != rank) {
        PyErr_SetString(PyExc_ValueError, "a descriptor has another rank than its kernel says");
        goto failed;
    }
    for (int i = 0; i < 2 * rank; i++) {
        int64_t *place = next(launch, 8);
        if (!place)
            goto failed;
        *place = i < rank ? sizes[i] : steps[i - rank];
    }
    Patch patch = {0, fill, (char *)map - launch->memory, slot, {0}, {0}};
    memcpy(patch.sizes, sizes, sizeof(sizes));
    memcpy(patch.steps, steps, sizeof(steps));
    uint64_t address = address_in(launch, of, patch);
    Py_DECREF(of);
    return !PyErr_Occurred() && encode(slot, map, address, sizes, steps, fill);
failed:
    Py_XDECREF(of);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a tensor has no such descriptor");
    return 0;
}

/* Add the parameters that arguments of Python are, of which those behind the last may be missing:
   they are constants of the kernel. */
static int add_arguments(Launch *launch, PyObject *arguments) {
    Py_ssize_t number = PyTuple_GET_SIZE(arguments);
    for (Py_ssize_t i = 0; i < number; i++) {
        if (launch->slot == launch->form->num_slots) {
            PyErr_SetString(PyExc_TypeError, "a kernel got more arguments than it has");
            return 0;
        }
        const Slot *slot = launch->form->slots + launch->slot++;
        PyObject *x = PyTuple_GET_ITEM(arguments, i);
        if (slot->kind == 'S')
            continue;
        if (slot->kind == 'T') {
            if (!PyTuple_Check(x) || PyTuple_GET_SIZE(x) != slot->count) {
                PyErr_SetString(PyExc_TypeError, "a kernel's tuple has another length");
                return 0;
            }
            if (!add_arguments(launch, x))
                return 0;
            continue;
        }
        if (slot->kind == 'D') {
            if (!add_descriptor(launch, slot, x))
                return 0;
            continue;
        }
        void *place = next(launch, 8);
        if (!place)
            return 0;
        if (slot->kind == 'P')
            *(uint64_t *)place = address_in(
                launch, x, (Patch){0, 0, (char *)place - launch->memory, NULL, {0}, {0}});
        else if (slot->kind == 'f')
            *(float *)place = (float)PyFloat_AsDouble(x);
        else if (slot->kind == 'd')
            *(double *)place = PyFloat_AsDouble(x);
        else
            *(uint64_t *)place = bits_of(x);
        if (PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* Whether a hook of Triton is set, such as a profiler's: one, or a chain of some; -1: an error. */
static int is_hooked(PyObject *hooks, PyObject *name) {
    PyObject *hook = PyObject_GetAttr(hooks, name), *chain;
    if (!hook)
        return -1;
    if (hook == Py_None) {
        Py_DECREF(hook);
        return 0;
    }
    if (!(chain = PyObject_GetAttr(hook, calls)))
        PyErr_Clear();
    int set = PyObject_IsTrue(chain ? chain : hook);
    Py_DECREF(hook);
    Py_XDECREF(chain);
    return set;
}

/* A thread that never used the GPU has no context of CUDA. */
static int has_context(int device) {
    void *context = NULL;
    if (!checked(cuda.context(&context), "to tell the context"))
        return 0;
    if (context)
        return 1;
    return checked(cuda.retain(&context, device), "a context") &&
           checked(cuda.set_context(context), "a context");
}

/* Whether a hook is set, 1, none, 0, or an error, -1. */
static int has_hooks(Form *form) {
    int hooked = is_hooked(form->hooks, enter_hook);
    return hooked ? hooked : is_hooked(form->hooks, exit_hook);
}

/* The blocks of a grid of programs. */
static int read_grid(Form *form, PyObject *grid, unsigned blocks[3]) {
    for (Py_ssize_t i = 0; i < 3; i++)
        blocks[i] = i < PyTuple_GET_SIZE(grid) ? bits_of(PyTuple_GET_ITEM(grid, i)) : 1;
    blocks[0] *= form->num_ctas;
    return !PyErr_Occurred();
}

/* A launch of so many blocks in the current stream. */
static int configure(Form *form, const unsigned blocks[3], Config *config) {
    *config = form->config;
    config->attributes = form->attributes;
    memcpy(config->grid, blocks, sizeof(config->grid));
    PyObject *stream = PyObject_CallOneArg(form->stream_of, form->number);
    if (!stream)
        return 0;
    config->stream = (void *)bits_of(stream);
    Py_DECREF(stream);
    return !PyErr_Occurred() && has_context(form->device);
}

/* Put all parameters of a launch together. */
static int add_all(Launch *launch, Form *form, PyObject *arguments) {
    launch->form = form;
    launch->slot = launch->parameters = launch->num_patches = 0;
    launch->used = 0;
    if (!add_arguments(launch, arguments))
        return 0;
    for (int i = 0; i < 2; i++) { /* no scratch memory, neither the program's nor a profiler's */
        uint64_t *place = next(launch, 8);
        if (!place)
            return 0;
        *place = 0;
    }
    if (launch->parameters == form->num_parameters)
        return 1;
    PyErr_SetString(PyExc_TypeError, "a kernel got fewer arguments than it has");
    return 0;
}

static int start(Form *form, const Config *config, void **pointers) {
    int error = 0;
    Py_BEGIN_ALLOW_THREADS;
    if (config->grid[0] && config->grid[1] && config->grid[2])
        error = cuda.launch(config, form->function, pointers, NULL);
    Py_END_ALLOW_THREADS;
    return checked(error, "a launch");
}

static PyObject *Form_call(Form *self, PyObject *given, PyObject *named) {
    PyObject *grid, *arguments;
    unsigned blocks[3];
    Config config;
    Launch launch;
    if (!PyArg_ParseTuple(given, "O!O!", &PyTuple_Type, &grid, &PyTuple_Type, &arguments))
        return NULL;
    int hooked = has_hooks(self);
    if (hooked)
        return hooked < 0 ? NULL : PyObject_Call(self->otherwise, given, NULL);
    launch.patches = NULL;
    if (!read_grid(self, grid, blocks) || !configure(self, blocks, &config) ||
        !add_all(&launch, self, arguments) ||
        !start(self, &config, launch.pointers))
        return NULL;
    Py_RETURN_NONE;
}

/* Add a slot for a type of the signature, and what it needs of parameters, checked with the driver:
   None, a format, a list of types, or (type, swizzle, bytes, box) of a descriptor. */
static int add_slot(Form *self, PyObject *kind);

static int has_size(Form *self, size_t bytes) {
    size_t offset, size = 0;
    if (cuda.parameter(self->function, self->num_parameters++, &offset, &size))
        size = 0;
    if (size == bytes)
        return 1;
    PyErr_Format(PyExc_ValueError, "parameter %d has %zu bytes and not %zu",
                 self->num_parameters - 1, size, bytes);
    return 0;
}

static int add_slots(Form *self, PyObject *kinds) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(kinds); i++)
        if (!add_slot(self, PyList_GET_ITEM(kinds, i)))
            return 0;
    return 1;
}

static int add_slot(Form *self, PyObject *kind) {
    Slot *more = PyMem_Realloc(self->slots, (self->num_slots + 1) * sizeof(Slot));
    if (!more) {
        PyErr_NoMemory();
        return 0;
    }
    self->slots = more;
    Slot *slot = self->slots + self->num_slots++;
    memset(slot, 0, sizeof(Slot));
    slot->kind = 'S';
    if (kind == Py_None)
        return 1;
    if (PyList_Check(kind)) {
        slot->kind = 'T';
        slot->count = PyList_GET_SIZE(kind);
        return add_slots(self, kind);
    }
    if (PyTuple_Check(kind)) {
        PyObject *box;
        slot->kind = 'D';
        if (!PyArg_ParseTuple(kind, "iiiO!", &slot->type, &slot->swizzle, &slot->bytes,
                              &PyTuple_Type, &box))
            return 0;
        int rank = slot->count = PyTuple_GET_SIZE(box);
        if (rank > MAX_RANK) {
            PyErr_SetString(PyExc_ValueError, "a descriptor has too many dimensions");
            return 0;
        }
        for (int i = 0; i < rank; i++)
            slot->box[i] = bits_of(PyTuple_GET_ITEM(box, rank - 1 - i));
        int fits = has_size(self, MAP_BYTES);
        for (int i = 0; i < 2 * rank; i++)
            fits = fits && has_size(self, i < rank ? 4 : 8);
        return fits;
    }
    const char *text = PyUnicode_AsUTF8(kind);
    if (!text)
        return 0;
    slot->kind = text[0];
    return has_size(self, text[0] == 'b' ? 1 : text[0] == 'h' ? 2 : strchr("if", text[0]) ? 4 : 8);
}

static void Form_dealloc(Form *self) {
    PyMem_Free(self->slots);
    Py_XDECREF(self->number);
    Py_XDECREF(self->stream_of);
    Py_XDECREF(self->hooks);
    Py_XDECREF(self->otherwise);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Form_new(PyTypeObject *type, PyObject *given, PyObject *named) {
    unsigned long long handle;
    int cooperative, after_previous;
    PyObject *kinds;
    Form *self = (Form *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    Config *config = &self->config;
    if (!PyArg_ParseTuple(given, "KO!IIippO!OOO", &handle, &PyLong_Type, &self->number,
                          &config->block[0], &config->shared, &self->num_ctas, &cooperative,
                          &after_previous, &PyList_Type, &kinds, &self->stream_of, &self->hooks,
                          &self->otherwise)) {
        self->number = self->stream_of = self->hooks = self->otherwise = NULL;
        goto failed;
    }
    Py_INCREF(self->number);
    Py_INCREF(self->stream_of);
    Py_INCREF(self->hooks);
    Py_INCREF(self->otherwise);
    self->device = PyLong_AsLong(self->number);
    self->function = (void *)handle;
    config->block[1] = config->block[2] = 1;
    Attribute *attributes = self->attributes;
    if (after_previous)
        attributes[config->number++] = (Attribute){AFTER_PREVIOUS, {1}};
    if (cooperative)
        attributes[config->number++] = (Attribute){COOPERATIVE, {1}};
    if (self->num_ctas != 1) {
        attributes[config->number++] = (Attribute){CLUSTER, {self->num_ctas, 1, 1}};
        attributes[config->number++] = (Attribute){SPREAD, {1}};
    }
    if (add_slots(self, kinds) && has_size(self, 8) && has_size(self, 8))
        return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef Form_members[] = {
    {"otherwise", T_OBJECT_EX, offsetof(Form, otherwise), READONLY, "launches as Triton does"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject FormType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Form",
    .tp_doc = "Form(function, device, threads, shared, num_ctas, cooperative, after_previous, "
              "kinds, stream_of, hooks, otherwise): a compiled kernel. form(grid, arguments) "
              "launches it in the current stream; with hooks, otherwise(grid, arguments) does.",
    .tp_basicsize = sizeof(Form),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_members = Form_members,
    .tp_new = Form_new,
    .tp_call = (ternaryfunc)Form_call,
    .tp_dealloc = (destructor)Form_dealloc,
};

/* Steps: launches whose parameters but for addresses are known */

typedef struct {
    Form *form;
    int num_patches;
    unsigned grid[3];
    size_t used, *places; /* of all parameters, in their memory */
    char *memory;
    Patch *patches;
} Step;

typedef struct {
    PyObject_HEAD
    PyObject *takes;
    int num_given, num_steps;
    Step *steps;
} Steps;

static void Steps_dealloc(Steps *self) {
    for (int i = 0; i < self->num_steps; i++) {
        Py_XDECREF(self->steps[i].form);
        PyMem_Free(self->steps[i].places);
        PyMem_Free(self->steps[i].memory);
        PyMem_Free(self->steps[i].patches);
    }
    PyMem_Free(self->steps);
    Py_XDECREF(self->takes);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static void *copied(const void *what, size_t bytes) {
    void *copy = PyMem_Malloc(bytes + 1);
    return copy ? memcpy(copy, what, bytes) : PyErr_NoMemory();
}

static PyObject *Steps_new(PyTypeObject *type, PyObject *given, PyObject *named) {
    Steps *self = (Steps *)type->tp_alloc(type, 0);
    PyObject *takes, *launches, *arguments, *grid;
    Form *form;
    Patch patches[MAX_PATCHES];
    Launch launch;
    launch.patches = patches;
    if (!self || !PyArg_ParseTuple(given, "iO!O!", &self->num_given, &PyTuple_Type, &takes,
                                   &PyTuple_Type, &launches))
        goto failed;
    self->takes = Py_NewRef(takes);
    int tensors = self->num_given + PyTuple_GET_SIZE(takes);
    self->steps = PyMem_Calloc(PyTuple_GET_SIZE(launches) + 1, sizeof(Step));
    if (!self->steps || tensors > MAX_TENSORS)
        goto failed;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(launches); i++) {
        Step *step = self->steps + self->num_steps;
        size_t places[MAX_PARAMETERS];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(launches, i), "O!O!O!", &FormType, &form,
                              &PyTuple_Type, &grid, &PyTuple_Type, &arguments) ||
            !add_all(&launch, form, arguments) || !read_grid(form, grid, step->grid))
            goto failed;
        for (int j = 0; j < launch.parameters; j++)
            places[j] = (char *)launch.pointers[j] - launch.memory;
        for (int j = 0; j < launch.num_patches; j++)
            if (patches[j].tensor < 0 || patches[j].tensor >= tensors)
                goto failed;
        self->num_steps++;
        step->form = (Form *)Py_NewRef(form);
        step->used = launch.used;
        step->num_patches = launch.num_patches;
        step->places = copied(places, launch.parameters * sizeof(size_t));
        step->memory = copied(launch.memory, launch.used);
        step->patches = copied(patches, launch.num_patches * sizeof(Patch));
        if (!step->places || !step->memory || !step->patches)
            goto failed;
    }
    return (PyObject *)self;
failed:
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "no such steps are possible");
    Py_XDECREF(self);
    return NULL;
}

static int launch_step(const Step *step, const uint64_t *addresses) {
    _Alignas(MAP_BYTES) char memory[MAX_BYTES];
    void *pointers[MAX_PARAMETERS];
    Config config;
    if (!configure(step->form, step->grid, &config))
        return 0;
    memcpy(memory, step->memory, step->used);
    for (int i = 0; i < step->form->num_parameters; i++)
        pointers[i] = memory + step->places[i];
    for (int i = 0; i < step->num_patches; i++) {
        const Patch *patch = step->patches + i;
        uint64_t address = addresses[patch->tensor];
        if (!patch->map)
            memcpy(memory + patch->place, &address, 8);
        else if (!encode(patch->map, memory + patch->place, address, patch->sizes, patch->steps,
                         patch->fill))
            return 0;
    }
    return start(step->form, &config, pointers);
}

/* None if a hook is set or a tensor is not aligned: nothing is launched then. */
static PyObject *Steps_call(Steps *self, PyObject *given, PyObject *named) {
    uint64_t addresses[MAX_TENSORS], all = 0;
    Py_ssize_t taken = PyTuple_GET_SIZE(self->takes);
    int hooked = self->num_steps ? has_hooks(self->steps[0].form) : 0;
    if (PyTuple_GET_SIZE(given) != self->num_given)
        return PyErr_Format(PyExc_TypeError, "%d tensors are wanted", self->num_given);
    for (int i = 0; i < self->num_given; i++)
        all |= addresses[i] = address_of(PyTuple_GET_ITEM(given, i));
    if (hooked < 0 || PyErr_Occurred())
        return NULL;
    if (hooked || all % 16)
        Py_RETURN_NONE;
    PyObject *found = PyTuple_New(taken);
    for (Py_ssize_t i = 0; found && i < taken; i++) {
        PyObject *function, *arguments, *x = NULL;
        if (PyArg_ParseTuple(PyTuple_GET_ITEM(self->takes, i), "OO!", &function, &PyTuple_Type,
                             &arguments))
            x = PyObject_Call(function, arguments, NULL);
        if (!x)
            goto failed;
        PyTuple_SET_ITEM(found, i, x);
        addresses[self->num_given + i] = address_of(x);
    }
    for (int i = 0; found && i < self->num_steps; i++)
        if (PyErr_Occurred() || !launch_step(self->steps + i, addresses))
            goto failed;
    return found;
failed:
    Py_DECREF(found);
    return NULL;
}

static PyTypeObject StepsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Steps",
    .tp_doc = "Steps(number, takes, launches): so many tensors are given, each of `takes` makes one "
              "more, a function and its arguments, and forms are launched, each a (form, grid, arguments) with a Place "
              "where a tensor will be. steps(*tensors) returns those that were taken; None if "
              "nothing was done: a hook is set, or a tensor is not aligned to 16 bytes.",
    .tp_basicsize = sizeof(Steps),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Steps_new,
    .tp_call = (ternaryfunc)Steps_call,
    .tp_dealloc = (destructor)Steps_dealloc,
};

/* Keys */

typedef struct {
    size_t used;
    char bytes[4096];
} Key;

static int put(Key *key, char mark, uint64_t number) {
    if (key->used + 9 > sizeof(key->bytes))
        return 0;
    key->bytes[key->used] = mark;
    memcpy(key->bytes + key->used + 1, &number, 8);
    key->used += 9;
    return 1;
}

/* Put what a kernel is compiled for of a tensor: its type and device, and whether boxes reach it;
   0 if it is not on the device, -1 being any, or an error. */
static int put_form(Key *key, PyObject *x, int64_t wanted) {
    PyObject *kind = PyObject_GetAttr(x, dtype);
    if (!kind)
        return 0;
    Py_DECREF(kind); /* types of torch are there for good */
    uint64_t address = address_of(x);
    int64_t device = number_of(x, get_device, 1);
    return !PyErr_Occurred() && (wanted < 0 || device == wanted) && put(key, 'x', (uint64_t)kind) &&
           put(key, address % 16 ? 'u' : 'a', (uint64_t)device);
}

/* Put all that decides how a tensor is served; 0 if it is unusual, or an error. Its shape goes to
   `dims` if it is contiguous and has four dimensions, else 0. */
static int put_tensor(Key *key, PyObject *x, int64_t device, int64_t dims[4]) {
    int64_t apart = 1;
    PyTypeObject *type = Py_TYPE(x);
    if ((PyObject *)type != tensor && (PyObject *)type != parameter)
        return 0;
    if (!put_form(key, x, device) || number_of(x, is_neg, 1))
        return 0;
    if (!put(key, 'r', number_of(x, requires_grad, 0)))
        return 0;
    for (int i = 0; i < 2; i++) {
        PyObject *found = i ? PyObject_CallMethodNoArgs(x, stride) : PyObject_GetAttr(x, shape);
        int fits = found && PyTuple_Check(found) && put(key, 's', PyTuple_GET_SIZE(found));
        for (Py_ssize_t j = 0; fits && j < PyTuple_GET_SIZE(found); j++) {
            uint64_t number = bits_of(PyTuple_GET_ITEM(found, j));
            fits = (i || number) && put(key, 'n', number); /* an empty tensor is unusual */
            if (!i && j < 4)
                dims[j] = PyTuple_GET_SIZE(found) == 4 ? (int64_t)number : 0;
        }
        for (Py_ssize_t j = 3; fits && i && dims[0] && j >= 0; apart *= dims[j--])
            if ((int64_t)bits_of(PyTuple_GET_ITEM(found, j)) != apart)
                dims[0] = 0;
        Py_XDECREF(found);
        if (!fits)
            return 0;
    }
    return 1;
}

/* Put an option: None, a number, a text, or a tuple of these; 0 if it is unusual. */
static int put_option(Key *key, PyObject *x) {
    if (x == Py_None || PyBool_Check(x))
        return put(key, 'o', (uint64_t)x);
    if (PyLong_CheckExact(x)) {
        int overflow;
        uint64_t number = PyLong_AsLongLongAndOverflow(x, &overflow);
        return !overflow && put(key, 'i', number);
    }
    if (PyFloat_CheckExact(x)) {
        uint64_t bits;
        double number = PyFloat_AS_DOUBLE(x);
        memcpy(&bits, &number, 8);
        return put(key, 'f', bits);
    }
    if (PyTuple_CheckExact(x)) {
        int fits = put(key, 't', PyTuple_GET_SIZE(x));
        for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(x); i++)
            fits = put_option(key, PyTuple_GET_ITEM(x, i));
        return fits;
    }
    Py_ssize_t size;
    const char *text = PyUnicode_CheckExact(x) ? PyUnicode_AsUTF8AndSize(x, &size) : NULL;
    if (!text || !put(key, 'c', size) || key->used + size > sizeof(key->bytes))
        return 0;
    memcpy(key->bytes + key->used, text, size);
    key->used += size;
    return 1;
}

/* Put what a power of two up to 128 divides. */
static int put_divisor(Key *key, int64_t number) {
    return put(key, 'd', number % 128 ? number & -number : 128);
}

/* Put what calls of other lengths share whose q, k and v are contiguous: kernels are the same where
   the same powers of two divide the keys, and the keys less the queries; 0 if there is none. */
static int put_similar(Key *key, int64_t dims[3][4]) {
    int64_t *q = dims[0], *k = dims[1], *v = dims[2];
    if (!q[0] || !k[0] || !v[0] || q[1] <= 64 || q[0] != k[0] || memcmp(k, v, 24) || q[3] != k[3] ||
        q[0] * q[1] * q[2] * q[3] >= 1 << 30 || k[0] * k[1] * k[2] * (k[3] + v[3]) >= 1 << 30)
        return 0;
    return put_divisor(key, k[1]) && put_divisor(key, k[1] - q[1]) && put(key, 'n', q[2]) &&
           put(key, 'n', k[2]) && put(key, 'n', q[3]) && put(key, 'n', v[3]);
}

/* look(device, tensors, options) */
static PyObject *look(PyObject *self, PyObject *const *given, Py_ssize_t number) {
    Key key = {0}, similar = {0};
    int64_t dims[3][4] = {{0}, {0}, {0}}, unused[4];
    if (number != 3 || !PyTuple_Check(given[1]) || !watchers) {
        PyErr_SetString(PyExc_TypeError, "look(device, tensors, options), behind prepare()");
        return NULL;
    }
    int64_t device = PyLong_AsLong(given[0]);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watchers); i++) {
        PyObject *found = PyObject_CallNoArgs(PyTuple_GET_ITEM(watchers, i));
        int is_set = found ? PyObject_IsTrue(found) : -1;
        Py_XDECREF(found);
        if (is_set < 0)
            return NULL;
        if (is_set)
            Py_RETURN_NONE;
    }
    PyObject *graded = PyObject_CallNoArgs(is_grad_enabled);
    if (!graded)
        return NULL;
    int fits = put_option(&key, graded) && put_option(&key, given[2]);
    Py_DECREF(graded);
    int is_plain = 1;
    similar = key;
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(given[1]); i++) {
        PyObject *x = PyTuple_GET_ITEM(given[1], i);
        Py_ssize_t before = 0; /* the same object came before: as cu_seqlens of keys may */
        while (x != Py_None && PyTuple_GET_ITEM(given[1], before) != x)
            before++;
        if (x == Py_None || before < i)
            fits = put(&key, 'm', x == Py_None ? (uint64_t)-1 : (uint64_t)before);
        else if ((fits = put_tensor(&key, x, device, i < 3 ? dims[i] : unused)) && i < 3)
            fits = put(&similar, 'x', number_of(x, requires_grad, 0)) && put_form(&similar, x, -1);
        is_plain = is_plain && (i < 3) == (x != Py_None);
    }
    if (!fits) {
        PyErr_Clear(); /* such as that of a tensor without strides */
        Py_RETURN_NONE;
    }
    if (is_plain && put_similar(&similar, dims))
        return Py_BuildValue("y#y#nnn", key.bytes, key.used, similar.bytes, similar.used,
                             (Py_ssize_t)dims[0][0], (Py_ssize_t)dims[0][1], (Py_ssize_t)dims[1][1]);
    return Py_BuildValue("y#Onnn", key.bytes, key.used, Py_None, (Py_ssize_t)0, (Py_ssize_t)0,
                         (Py_ssize_t)0);
}

/* Put what Triton's compiler knows of an argument; what is no number and no tensor goes to others.
   0: an error. */
static int put_kind(Key *key, PyObject *x, PyObject *others) {
    PyTypeObject *type = Py_TYPE(x);
    if (x == Py_None)
        return put(key, 'o', 0);
    if (type == &PyLong_Type) {
        int overflow;
        int64_t number = PyLong_AsLongLongAndOverflow(x, &overflow);
        int is_short = !overflow && number == (int32_t)number;
        if (number == 1 && !overflow)
            return put(key, 'i', 1);
        return put(key, 'i', 2 + (bits_of(x) % 16 == 0) + 2 * is_short);
    }
    if (type == &PyFloat_Type)
        return put(key, 'f', 0);
    if (PyTuple_Check(x)) {
        int fits = put(key, 't', PyTuple_GET_SIZE(x)) && !PyList_Append(others, (PyObject *)type);
        for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(x); i++)
            fits = put_kind(key, PyTuple_GET_ITEM(x, i), others);
        return fits;
    }
    if (PyObject_TypeCheck(x, (PyTypeObject *)tensor))
        return put_form(key, x, -1);
    if (PyObject_TypeCheck(x, (PyTypeObject *)function)) /* its hash is that of its source */
        return put(key, 'p', (uint64_t)x);
    if (PyObject_TypeCheck(x, (PyTypeObject *)constant)) { /* its hash is written in Python */
        PyObject *found = PyObject_GetAttr(x, value);
        int fits = found && !PyList_Append(others, found);
        Py_XDECREF(found);
        return fits;
    }
    PyObject *of = PyObject_GetAttr(x, base), *box = of ? PyObject_GetAttr(x, block_shape) : NULL;
    PyErr_Clear();
    PyObject *rest = box ? PySequence_Tuple(box) : Py_NewRef(x), *swizzled = NULL;
    int fits = rest && (!box || put_form(key, of, -1)) && !PyList_Append(others, rest);
    if (fits && box && (swizzled = PyObject_GetAttr(x, layout)))
        fits = !PyList_Append(others, swizzled);
    else if (fits)
        PyErr_Clear(); /* a descriptor of Triton has no layout */
    Py_XDECREF(swizzled);
    Py_XDECREF(rest);
    Py_XDECREF(box);
    Py_XDECREF(of);
    return fits;
}

/* kinds(arguments, unread, constants): see its documentation. */
static PyObject *kinds(PyObject *self, PyObject *const *given, Py_ssize_t number) {
    Key key = {0};
    if (number != 3 || !PyTuple_Check(given[0]) || !PyBytes_Check(given[1]) ||
        !PyTuple_Check(given[2]) || PyBytes_GET_SIZE(given[1]) < PyTuple_GET_SIZE(given[0])) {
        PyErr_SetString(PyExc_TypeError, "kinds(arguments, unread, constants)");
        return NULL;
    }
    PyObject *others = PyList_New(1), *found = NULL;
    int fits = others != NULL;
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(given[0]); i++) {
        PyObject *x = PyTuple_GET_ITEM(given[0], i);
        if (PyBytes_AS_STRING(given[1])[i])
            fits = put(&key, 'u', x == Py_None);
        else
            fits = put_kind(&key, x, others);
    }
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(given[2]); i++) {
        PyObject *x = PyTuple_GET_ITEM(given[2], i);
        if (PyObject_TypeCheck(x, (PyTypeObject *)function))
            fits = put(&key, 'p', (uint64_t)x);
        else
            fits = !PyList_Append(others, x);
    }
    if (fits && (found = PyBytes_FromStringAndSize(key.bytes, key.used))) {
        PyList_SET_ITEM(others, 0, found);
        found = PyList_AsTuple(others);
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a kernel has too many arguments");
    Py_XDECREF(others);
    return found;
}

/* prepare(Tensor, Parameter, JITFunction, constexpr, Place, watchers, is_grad_enabled) */
static PyObject *prepare(PyObject *self, PyObject *given) {
    if (!PyArg_ParseTuple(given, "OOOOOO!O", &tensor, &parameter, &function, &constant,
                          &place_type, &PyTuple_Type, &watchers, &is_grad_enabled))
        return NULL;
    Py_INCREF(given); /* and so all of these, for good */
    void *library = dlopen("libcuda.so.1", RTLD_LAZY);
    struct {
        const char *name;
        void *target;
    } wanted[] = {
        {"cuLaunchKernelEx", &cuda.launch},      {"cuTensorMapEncodeTiled", &cuda.encode},
        {"cuFuncGetParamInfo", &cuda.parameter}, {"cuCtxGetCurrent", &cuda.context},
        {"cuCtxSetCurrent", &cuda.set_context},  {"cuDevicePrimaryCtxRetain", &cuda.retain},
        {"cuGetErrorString", &cuda.message},     {"cuDriverGetVersion", &cuda.version},
    };
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        void *found = library ? dlsym(library, wanted[i].name) : NULL;
        if (!found)
            return PyErr_Format(PyExc_ImportError, "CUDA's driver has no %s", wanted[i].name);
        memcpy(wanted[i].target, &found, sizeof(found));
    }
    if (!checked(cuda.version(&driver_version), "its version"))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"look", (PyCFunction)(void (*)(void))look, METH_FASTCALL,
     "look(device, tensors, options): (the key of a call, a key that it shares with calls of other "
     "lengths or None, batch, length, kv_length), or None if it is unusual: if a watcher "
     "sees it, a tensor is empty, of another device, of a subclass, or without strides, or if an "
     "option is neither a number, a text, a tuple of these nor None."},
    {"kinds", (PyCFunction)(void (*)(void))kinds, METH_FASTCALL,
     "kinds(arguments, unread, constants): the key of a kernel's compiled form: of a tensor its "
     "type and device, and whether it is aligned to 16 bytes; of an integer whether it is 1, a "
     "multiple of 16, or needs 64 bits; of a descriptor its box. Of an argument whose byte in "
     "`unread` is not 0 only whether it is None; constants as they are."},
    {"prepare", prepare, METH_VARARGS,
     "prepare(Tensor, Parameter, JITFunction, constexpr, Place, watchers, is_grad_enabled): once, before all else."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "launch", "See launch.c.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_launch(void) {
    PyObject **names[] = {&data_ptr, &base, &shape, &strides, &stride, &padding, &dtype,
                          &get_device, &requires_grad, &is_neg, &calls, &enter_hook, &exit_hook,
                          &zero, &block_shape, &layout, &value, &number_name};
    const char *texts[] = {"data_ptr", "base", "shape", "strides", "stride", "padding", "dtype",
                           "get_device", "requires_grad", "is_neg", "calls", "launch_enter_hook",
                           "launch_exit_hook", "zero", "block_shape", "layout", "value",
                           "number"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        if (!(*names[i] = PyUnicode_InternFromString(texts[i])))
            return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made || PyType_Ready(&FormType) < 0 || PyType_Ready(&StepsType) < 0 ||
        PyModule_AddObjectRef(made, "Form", (PyObject *)&FormType) < 0 ||
        PyModule_AddObjectRef(made, "Steps", (PyObject *)&StepsType) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
