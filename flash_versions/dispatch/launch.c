/* The parts of a call that would take Python too long: the key by which a call, or a kernel's
   compiled form, is known, and the launch of a kernel by CUDA's driver.

   A launch of Triton asks the driver about every address and makes an object of Python for every
   TMA descriptor. A `Form` reads the same arguments, encodes descriptors where the kernel's
   parameters are put together, and launches. CUDA's header is not needed: what is used of it is
   declared here. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* CUDA's driver */

typedef struct {
    uint64_t id, value[8];
} Attribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned number;
} Config;

enum { PROMOTE_128 = 2, FILL_ZERO = 0, FILL_NAN = 1 };
enum { MAP_BYTES = 128, MAX_RANK = 5, MAX_PARAMETERS = 512, MAX_BYTES = 16384,
       MAX_PATCHES = 64, MAX_TENSORS = 32, MAX_ATTRIBUTES = 4, ANY_DEVICE = -2 };

/* In the order of `launch.DRIVER`. */
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

/* Names of attributes and methods, as Python's texts. */
#define NAMES                                                                                   \
    NAME(data_ptr) NAME(base) NAME(shape) NAME(strides) NAME(stride) NAME(padding) NAME(dtype)   \
    NAME(get_device) NAME(requires_grad) NAME(is_neg) NAME(calls) NAME(launch_enter_hook)        \
    NAME(launch_exit_hook) NAME(zero) NAME(block_shape) NAME(layout) NAME(value) NAME(number)
#define NAME(name) static PyObject *name;
NAMES
#undef NAME
static PyObject *tensor, *parameter, *function, *constant, *watchers, *is_grad_enabled; /* see
   `prepare` */

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

/* The address of a tensor, an address, or 0 for None; an error is Python's. */
static uint64_t address_of(PyObject *x) {
    if (x == Py_None)
        return 0;
    PyObject *found = PyLong_Check(x) ? Py_NewRef(x) : PyObject_CallMethodNoArgs(x, data_ptr);
    uint64_t address = found ? bits_of(found) : 0;
    Py_XDECREF(found);
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

/* What an argument of a kernel is; `launch.slots_of` makes an array of these. */
typedef struct {
    int32_t kind;    /* S: no parameter, T: a tuple, D: a descriptor, else a format of `struct` */
    int32_t count;   /* parts of a tuple, which follow; dimensions of a descriptor */
    int32_t type, swizzle, bytes; /* of a descriptor's elements */
    uint32_t box[MAX_RANK];       /* the innermost dimension first, as CUDA has them */
} Slot;

typedef struct {
    PyObject_HEAD
    void *function;
    int num_ctas, num_slots, num_parameters, device;
    Config config;
    Attribute attributes[MAX_ATTRIBUTES];
    Slot *slots;
    PyObject *number, *stream_of, *hooks, *otherwise; /* number: of the device, as an object */
} Form;

/* A parameter that holds the address of a tensor of `Steps`, or its map. */
typedef struct {
    int tensor, fill;
    size_t place;
    const Slot *map; /* NULL: an address */
} Patch;

/* The parameters of a launch, in memory. */
typedef struct {
    Form *form;
    int slot, parameters, num_patches;
    size_t used; /* bytes */
    Patch *patches; /* NULL if arguments are tensors */
    uint16_t places[MAX_PARAMETERS];
    _Alignas(MAP_BYTES) char memory[MAX_BYTES];
} Launch;

/* Memory for the next parameter of a launch. */
static void *next(Launch *launch, size_t bytes) {
    if (launch->parameters == MAX_PARAMETERS || launch->used + bytes > MAX_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a kernel has too many parameters");
        return NULL;
    }
    launch->places[launch->parameters++] = launch->used;
    launch->used += bytes;
    return launch->memory + launch->used - bytes;
}

/* Encode a map of TMA as Triton does, of the sizes and steps behind it in memory. */
static int encode(const Slot *slot, char *map, uint64_t address, int fill) {
    int rank = slot->count;
    int64_t numbers[2 * MAX_RANK], *sizes = numbers, *steps = numbers + rank;
    uint64_t dims[MAX_RANK], bytes[MAX_RANK];
    uint32_t ones[MAX_RANK] = {1, 1, 1, 1, 1};
    double last = 0; /* byte; boxes of sequences reach past 2^64 */
    memcpy(numbers, map + MAP_BYTES, 16 * rank);
    for (int i = 0; i < rank; i++) {
        dims[i] = sizes[rank - 1 - i];
        bytes[i] = slot->bytes * (i + 1 < rank ? steps[rank - 2 - i] : 0);
        last += (double)(dims[i] - 1) * (i ? bytes[i - 1] : (uint64_t)slot->bytes);
    }
    if (!checked(cuda.encode(map, slot->type, rank, (void *)address, dims, bytes, slot->box, ones,
                             0, slot->swizzle, PROMOTE_128, fill), "a TMA descriptor"))
        return 0;
    /* Drivers up to 13.1 encode tensors below 128 KiB wrongly; CUTLASS and Triton clear bit 21 of
       the second word. */
    if (driver_version <= 13010 && last + 1 < 128 * 1024)
        map[8 + 21 / 8] &= ~(1 << 21 % 8);
    return 1;
}

/* The address of an argument; if it is a place of `Steps`, any, and a patch for later. */
static uint64_t address_in(Launch *launch, PyObject *x, Patch patch) {
    if (!launch->patches || x == Py_None || PyObject_TypeCheck(x, (PyTypeObject *)tensor))
        return address_of(x);
    patch.tensor = (int)number_of(x, number, 0);
    if (launch->num_patches < MAX_PATCHES)
        launch->patches[launch->num_patches++] = patch;
    else
        PyErr_SetString(PyExc_ValueError, "a kernel has too many tensors");
    return MAP_BYTES;
}

/* Add a parameter of eight bytes, or fewer of a number that is small. */
static int add_number(Launch *launch, uint64_t number) {
    char *place = next(launch, 8);
    return place && memcpy(place, &number, 8);
}

/* Add so many whole numbers as parameters, a sequence of Python, which is given away. */
static int add_numbers(Launch *launch, PyObject *given, int count) {
    PyObject *found = given ? PySequence_Tuple(given) : NULL;
    Py_XDECREF(given);
    if (found && PyTuple_GET_SIZE(found) != count)
        PyErr_SetString(PyExc_ValueError, "a descriptor has another rank than its kernel says");
    for (int i = 0; i < count && !PyErr_Occurred(); i++)
        add_number(launch, bits_of(PyTuple_GET_ITEM(found, i)));
    Py_XDECREF(found);
    return !PyErr_Occurred();
}

/* A part of a descriptor, (box, tensor, shape, strides), see `tma.Box`, or one of Triton. */
static PyObject *part_of(PyObject *x, int i, PyObject *name) {
    return PyTuple_CheckExact(x) ? PySequence_GetItem(x, i) : PyObject_GetAttr(x, name);
}

/* Add the parameters of a descriptor: its map, its shape, its strides. */
static int add_descriptor(Launch *launch, const Slot *slot, PyObject *x) {
    int fill = FILL_ZERO;
    launch->used = (launch->used + MAP_BYTES - 1) / MAP_BYTES * MAP_BYTES;
    char *map = next(launch, MAP_BYTES);
    if (!map || !add_numbers(launch, part_of(x, 2, shape), slot->count) ||
        !add_numbers(launch, part_of(x, 3, strides), slot->count))
        return 0;
    if (!PyTuple_CheckExact(x)) {
        PyObject *padded = PyObject_GetAttr(x, padding);
        int same = padded ? PyObject_RichCompareBool(padded, zero, Py_EQ) : -1;
        Py_XDECREF(padded);
        if (same < 0)
            return 0;
        fill = same ? FILL_ZERO : FILL_NAN;
    }
    PyObject *of = part_of(x, 1, base);
    if (!of)
        return 0;
    uint64_t address = address_in(launch, of, (Patch){0, fill, map - launch->memory, slot});
    Py_DECREF(of);
    return !PyErr_Occurred() && encode(slot, map, address, fill);
}

/* Add a parameter that is an address or a number. */
static int add_scalar(Launch *launch, int kind, PyObject *x) {
    Patch patch = {0, 0, launch->used, NULL};
    int64_t number = 0;
    if (kind == 'f' || kind == 'd') {
        double given = PyFloat_AsDouble(x);
        float rounded = (float)given;
        memcpy(&number, kind == 'f' ? (void *)&rounded : &given, kind == 'f' ? 4 : 8);
    } else
        number = kind == 'P' ? address_in(launch, x, patch) : bits_of(x);
    if (kind == 'i' && number != (int32_t)number && !PyErr_Occurred())
        PyErr_SetString(PyExc_OverflowError, "a number needs more than a kernel's 32 bits");
    return !PyErr_Occurred() && add_number(launch, number);
}

/* Add the parameters that arguments of Python are, of which those behind the last may be missing:
   they are constants of the kernel. */
static int add_arguments(Launch *launch, PyObject *arguments) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); i++) {
        if (launch->slot == launch->form->num_slots) {
            PyErr_SetString(PyExc_TypeError, "a kernel got more arguments than it has");
            return 0;
        }
        const Slot *slot = launch->form->slots + launch->slot++;
        PyObject *x = PyTuple_GET_ITEM(arguments, i);
        int fits = 1;
        if (slot->kind == 'T' && (!PyTuple_Check(x) || PyTuple_GET_SIZE(x) != slot->count)) {
            PyErr_SetString(PyExc_TypeError, "a kernel's tuple has another length");
            return 0;
        }
        if (slot->kind == 'T')
            fits = add_arguments(launch, x);
        else if (slot->kind == 'D')
            fits = add_descriptor(launch, slot, x);
        else if (slot->kind != 'S')
            fits = add_scalar(launch, slot->kind, x);
        if (!fits)
            return 0;
    }
    return 1;
}

/* Put all parameters of a launch together. */
static int add_all(Launch *launch, Form *form, PyObject *arguments) {
    launch->form = form;
    launch->slot = launch->parameters = launch->num_patches = 0;
    launch->used = 0;
    /* No scratch memory, neither the program's nor a profiler's. */
    if (!add_arguments(launch, arguments) || !add_number(launch, 0) || !add_number(launch, 0))
        return 0;
    if (launch->parameters == form->num_parameters)
        return 1;
    PyErr_SetString(PyExc_TypeError, "a kernel got fewer arguments than it has");
    return 0;
}

/* Whether a hook of Triton is set, such as a profiler's: one, or a chain of some; -1: an error. */
static int has_hooks(Form *form) {
    PyObject *names[] = {launch_enter_hook, launch_exit_hook};
    int set = 0;
    for (int i = 0; i < 2 && !set; i++) {
        PyObject *hook = PyObject_GetAttr(form->hooks, names[i]), *chain = NULL;
        if (!hook)
            return -1;
        if (hook != Py_None && !(chain = PyObject_GetAttr(hook, calls)))
            PyErr_Clear();
        set = PyObject_IsTrue(chain ? chain : hook);
        Py_XDECREF(chain);
        Py_DECREF(hook);
    }
    return set;
}

/* The blocks of a grid of one to three dimensions. */
static int read_grid(Form *form, PyObject *grid, unsigned blocks[3]) {
    for (Py_ssize_t i = 0; i < 3; i++) {
        uint64_t number = i < PyTuple_GET_SIZE(grid) ? bits_of(PyTuple_GET_ITEM(grid, i)) : 1;
        blocks[i] = number *= i ? 1 : form->num_ctas;
        if (number > INT32_MAX && !PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a grid has too many programs");
    }
    return !PyErr_Occurred();
}

/* A thread that never used the GPU has no context of CUDA. */
static int has_context(int device) {
    void *context = NULL;
    if (!checked(cuda.context(&context), "to tell the context"))
        return 0;
    return context || (checked(cuda.retain(&context, device), "a context") &&
                       checked(cuda.set_context(context), "a context"));
}

/* Launch so many blocks in the current stream, of parameters at these places in memory. Other
   threads may run meanwhile, so the memory is the caller's own. */
static int start(Form *form, const unsigned blocks[3], char *memory, const uint16_t *places) {
    void *pointers[MAX_PARAMETERS];
    Config config = form->config;
    int error = 0;
    config.attributes = form->attributes;
    memcpy(config.grid, blocks, sizeof(config.grid));
    PyObject *stream = PyObject_CallOneArg(form->stream_of, form->number);
    config.stream = stream ? (void *)bits_of(stream) : NULL;
    Py_XDECREF(stream);
    if (PyErr_Occurred() || !has_context(form->device))
        return 0;
    for (int i = 0; i < form->num_parameters; i++)
        pointers[i] = memory + places[i];
    Py_BEGIN_ALLOW_THREADS;
    if (blocks[0] && blocks[1] && blocks[2])
        error = cuda.launch(&config, form->function, pointers, NULL);
    Py_END_ALLOW_THREADS;
    return checked(error, "a launch");
}

static PyObject *Form_call(Form *self, PyObject *given, PyObject *named) {
    PyObject *grid, *arguments;
    unsigned blocks[3];
    Launch launch;
    if (!PyArg_ParseTuple(given, "O!O!", &PyTuple_Type, &grid, &PyTuple_Type, &arguments))
        return NULL;
    int hooked = has_hooks(self);
    if (hooked)
        return hooked < 0 ? NULL : PyObject_Call(self->otherwise, given, NULL);
    launch.patches = NULL;
    if (!read_grid(self, grid, blocks) || !add_all(&launch, self, arguments) ||
        !start(self, blocks, launch.memory, launch.places))
        return NULL;
    Py_RETURN_NONE;
}

static void Form_dealloc(Form *self) {
    PyMem_Free(self->slots);
    Py_XDECREF(self->number);
    Py_XDECREF(self->stream_of);
    Py_XDECREF(self->hooks);
    Py_XDECREF(self->otherwise);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* A copy of so many bytes; NULL: an error of Python. */
static void *copied(const void *what, size_t bytes) {
    void *copy = PyMem_Malloc(bytes + 1);
    return copy ? memcpy(copy, what, bytes) : PyErr_NoMemory();
}

static PyObject *Form_new(PyTypeObject *type, PyObject *given, PyObject *named) {
    unsigned long long handle;
    int parameters;
    unsigned threads, shared, num_ctas;
    PyObject *device, *stream_of, *hooks, *otherwise;
    const char *attributes, *slots;
    Py_ssize_t attributes_size, slots_size;
    if (!PyArg_ParseTuple(given, "KO!IIIy#y#iOOO", &handle, &PyLong_Type, &device, &threads,
                          &shared, &num_ctas, &attributes, &attributes_size, &slots, &slots_size,
                          &parameters, &stream_of, &hooks, &otherwise))
        return NULL;
    unsigned number = attributes_size / sizeof(Attribute);
    if (number > MAX_ATTRIBUTES || parameters > MAX_PARAMETERS)
        return PyErr_Format(PyExc_ValueError, "a kernel has too many parameters");
    Form *self = (Form *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->number = Py_NewRef(device);
    self->stream_of = Py_NewRef(stream_of);
    self->hooks = Py_NewRef(hooks);
    self->otherwise = Py_NewRef(otherwise);
    self->device = PyLong_AsLong(device);
    self->function = (void *)handle;
    self->num_ctas = num_ctas;
    self->num_parameters = parameters;
    self->num_slots = slots_size / sizeof(Slot);
    self->config = (Config){.block = {threads, 1, 1}, .shared = shared, .number = number};
    memcpy(self->attributes, attributes, number * sizeof(Attribute));
    self->slots = copied(slots, slots_size);
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject FormType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Form",
    .tp_doc = "Form(function, device, threads, shared, num_ctas, attributes, slots, parameters, "
              "stream_of, hooks, otherwise): a compiled kernel, with arrays of its launch's "
              "attributes and of its arguments' slots, and the number of its parameters. "
              "form(grid, arguments) launches it in the current stream; with hooks, "
              "otherwise(grid, arguments) does.",
    .tp_basicsize = sizeof(Form),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Form_new,
    .tp_call = (ternaryfunc)Form_call,
    .tp_dealloc = (destructor)Form_dealloc,
};

/* sizes(function): the bytes of each parameter, as the driver knows them. */
static PyObject *sizes_of(PyObject *self, PyObject *handle) {
    void *kernel = (void *)bits_of(handle);
    size_t offset, bytes;
    PyObject *found = PyErr_Occurred() ? NULL : PyList_New(0);
    for (int i = 0; found && !cuda.parameter(kernel, i, &offset, &bytes); i++) {
        PyObject *one = PyLong_FromSize_t(bytes);
        if (!one || PyList_Append(found, one) < 0)
            Py_CLEAR(found);
        Py_XDECREF(one);
    }
    return found;
}

/* Steps: launches whose parameters but for addresses are known */

typedef struct {
    Form *form;
    unsigned grid[3];
    int num_patches;
    size_t used;
    uint16_t *places; /* of all parameters, in their memory */
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

/* Fill in a step, of a (form, grid, arguments), with places for so many tensors. */
static int make_step(Step *step, PyObject *given, int tensors) {
    PyObject *grid, *arguments;
    Form *form;
    Patch patches[MAX_PATCHES];
    Launch launch;
    launch.patches = patches;
    if (!PyArg_ParseTuple(given, "O!O!O!", &FormType, &form, &PyTuple_Type, &grid, &PyTuple_Type,
                          &arguments) ||
        !read_grid(form, grid, step->grid) || !add_all(&launch, form, arguments))
        return 0;
    for (int i = 0; i < launch.num_patches; i++)
        if (patches[i].tensor < 0 || patches[i].tensor >= tensors) {
            PyErr_SetString(PyExc_ValueError, "a place is that of no tensor");
            return 0;
        }
    step->form = (Form *)Py_NewRef(form);
    step->used = launch.used;
    step->num_patches = launch.num_patches;
    step->places = copied(launch.places, launch.parameters * sizeof(uint16_t));
    step->memory = copied(launch.memory, launch.used);
    step->patches = copied(patches, launch.num_patches * sizeof(Patch));
    return step->places && step->memory && step->patches;
}

static PyObject *Steps_new(PyTypeObject *type, PyObject *given, PyObject *named) {
    PyObject *takes, *launches;
    int number;
    if (!PyArg_ParseTuple(given, "iO!O!", &number, &PyTuple_Type, &takes, &PyTuple_Type, &launches))
        return NULL;
    Py_ssize_t tensors = number + PyTuple_GET_SIZE(takes), steps = PyTuple_GET_SIZE(launches);
    if (number < 0 || tensors > MAX_TENSORS || !steps)
        return PyErr_Format(PyExc_ValueError, "%zd launches of %zd tensors are no steps", steps,
                            tensors);
    Steps *self = (Steps *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->takes = Py_NewRef(takes);
    self->num_given = number;
    self->steps = PyMem_Calloc(steps, sizeof(Step));
    int fits = self->steps || PyErr_NoMemory();
    for (Py_ssize_t i = 0; fits && i < steps; i++) {
        self->num_steps++;
        fits = make_step(self->steps + i, PyTuple_GET_ITEM(launches, i), tensors);
    }
    if (!fits)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int launch_step(const Step *step, const uint64_t *addresses) {
    _Alignas(MAP_BYTES) char memory[MAX_BYTES];
    memcpy(memory, step->memory, step->used);
    for (int i = 0; i < step->num_patches; i++) {
        const Patch *patch = step->patches + i;
        char *place = memory + patch->place;
        if (!patch->map)
            memcpy(place, addresses + patch->tensor, 8);
        else if (!encode(patch->map, place, addresses[patch->tensor], patch->fill))
            return 0;
    }
    return start(step->form, step->grid, memory, step->places);
}

/* None if a hook is set or a tensor is not aligned: nothing is launched then. What was taken is
   returned, and so lives until all is launched. */
static PyObject *Steps_call(Steps *self, PyObject *given, PyObject *named) {
    uint64_t addresses[MAX_TENSORS], all = 0;
    Py_ssize_t taken = PyTuple_GET_SIZE(self->takes);
    if (PyTuple_GET_SIZE(given) != self->num_given)
        return PyErr_Format(PyExc_TypeError, "%d tensors are wanted", self->num_given);
    for (int i = 0; i < self->num_given; i++) {
        all |= addresses[i] = address_of(PyTuple_GET_ITEM(given, i));
        if (PyErr_Occurred())
            return NULL;
    }
    int hooked = has_hooks(self->steps[0].form);
    if (hooked < 0)
        return NULL;
    if (hooked || all % 16)
        Py_RETURN_NONE;
    PyObject *found = PyTuple_New(taken);
    int fits = found != NULL;
    for (Py_ssize_t i = 0; fits && i < taken; i++) {
        PyObject *maker, *arguments, *x = NULL;
        if (PyArg_ParseTuple(PyTuple_GET_ITEM(self->takes, i), "OO!", &maker, &PyTuple_Type,
                             &arguments) &&
            (x = PyObject_Call(maker, arguments, NULL))) {
            PyTuple_SET_ITEM(found, i, x);
            addresses[self->num_given + i] = address_of(x);
        }
        fits = !PyErr_Occurred();
    }
    for (int i = 0; fits && i < self->num_steps; i++)
        fits = launch_step(self->steps + i, addresses);
    if (!fits)
        Py_CLEAR(found);
    return found;
}

static PyTypeObject StepsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Steps",
    .tp_doc = "Steps(number, takes, launches): so many tensors are given, each of `takes` makes "
              "one more, a function and its arguments, and forms are launched, each a (form, "
              "grid, arguments) with a Place where a tensor will be. steps(*tensors) returns "
              "those that were taken; None if nothing was done: a hook is set, or a tensor is not "
              "aligned to 16 bytes.",
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

static int put(Key *key, char mark, uint64_t bits) {
    if (key->used + 9 > sizeof(key->bytes))
        return 0;
    key->bytes[key->used] = mark;
    memcpy(key->bytes + key->used + 1, &bits, 8);
    key->used += 9;
    return 1;
}

/* Put what a kernel is compiled for of a tensor: its type and device, and whether boxes reach it;
   0 if it is not on the device, or an error. */
static int put_form(Key *key, PyObject *x, int64_t wanted) {
    PyObject *kind = PyObject_GetAttr(x, dtype);
    if (!kind)
        return 0;
    Py_DECREF(kind); /* types of torch are there for good */
    uint64_t address = address_of(x);
    int64_t device = PyErr_Occurred() ? 0 : number_of(x, get_device, 1);
    return !PyErr_Occurred() && (wanted == ANY_DEVICE || device == wanted) &&
           put(key, 'x', (uint64_t)kind) && put(key, address % 16 ? 'u' : 'a', (uint64_t)device);
}

/* Put all that decides how a tensor is served; 0 if it is unusual, or an error. Its shape goes to
   `dims` if it is contiguous and has four dimensions, else 0. */
static int put_tensor(Key *key, PyObject *x, int64_t device, int64_t dims[4]) {
    PyObject *type = (PyObject *)Py_TYPE(x);
    dims[0] = 0;
    if ((type != tensor && type != parameter) || !put_form(key, x, device) ||
        number_of(x, is_neg, 1) || !put(key, 'r', number_of(x, requires_grad, 0)))
        return 0;
    PyObject *sizes = PyObject_GetAttr(x, shape);
    PyObject *steps = sizes ? PyObject_CallMethodNoArgs(x, stride) : NULL;
    Py_ssize_t rank = steps ? PyTuple_GET_SIZE(sizes) : 0;
    int fits = steps && put(key, 's', rank);
    int is_contiguous = rank == 4;
    int64_t apart = 1;
    for (Py_ssize_t i = rank - 1; fits && i >= 0; i--) {
        uint64_t size = bits_of(PyTuple_GET_ITEM(sizes, i));
        uint64_t step = bits_of(PyTuple_GET_ITEM(steps, i));
        fits = size && put(key, 'n', size) && put(key, 'n', step); /* none is empty */
        is_contiguous = is_contiguous && (int64_t)step == apart;
        if (rank == 4)
            dims[i] = size;
        apart *= size;
    }
    if (!is_contiguous)
        dims[0] = 0;
    Py_XDECREF(sizes);
    Py_XDECREF(steps);
    return fits && !PyErr_Occurred();
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
    int fits = put_option(&key, graded) && put_option(&key, given[2]), is_plain = 1;
    Py_DECREF(graded);
    similar = key;
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(given[1]); i++) {
        PyObject *x = PyTuple_GET_ITEM(given[1], i);
        Py_ssize_t before = 0; /* the same object came before: as cu_seqlens of keys may */
        while (x != Py_None && PyTuple_GET_ITEM(given[1], before) != x)
            before++;
        if (x == Py_None || before < i)
            fits = put(&key, 'm', x == Py_None ? (uint64_t)-1 : (uint64_t)before);
        else if ((fits = put_tensor(&key, x, device, i < 3 ? dims[i] : unused)) && i < 3)
            fits = put(&similar, 'r', number_of(x, requires_grad, 0)) &&
                   put_form(&similar, x, device);
        is_plain = is_plain && (i < 3) == (x != Py_None);
    }
    if (!fits) {
        PyErr_Clear(); /* such as that of a tensor without strides */
        Py_RETURN_NONE;
    }
    if (is_plain && put_similar(&similar, dims))
        return Py_BuildValue("y#y#", key.bytes, key.used, similar.bytes, similar.used);
    return Py_BuildValue("y#O", key.bytes, key.used, Py_None);
}

/* Put that something is compared as an object of Python: the next one of others. */
static int put_aside(Key *key, PyObject *others, PyObject *x) {
    return put(key, 'y', 0) && !PyList_Append(others, x);
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
        return put(key, 'i', 2 + (bits_of(x) % 16 == 0) + 2 * is_short + 4 * !!overflow);
    }
    if (type == &PyFloat_Type)
        return put(key, 'f', 0);
    if (PyTuple_Check(x)) {
        int fits = put(key, 't', PyTuple_GET_SIZE(x)) && put_aside(key, others, (PyObject *)type);
        for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(x); i++)
            fits = put_kind(key, PyTuple_GET_ITEM(x, i), others);
        return fits;
    }
    if (PyObject_TypeCheck(x, (PyTypeObject *)tensor))
        return put_form(key, x, ANY_DEVICE);
    if (PyObject_TypeCheck(x, (PyTypeObject *)function)) /* its hash is that of its source */
        return put(key, 'p', (uint64_t)x);
    if (PyObject_TypeCheck(x, (PyTypeObject *)constant)) { /* its hash is written in Python */
        PyObject *found = PyObject_GetAttr(x, value);
        int fits = found && put_aside(key, others, found);
        Py_XDECREF(found);
        return fits;
    }
    PyObject *of = PyObject_GetAttr(x, base), *box = of ? PyObject_GetAttr(x, block_shape) : NULL;
    PyErr_Clear();
    if (!box) {
        Py_XDECREF(of);
        return put_aside(key, others, x);
    }
    PyObject *sizes = PySequence_Tuple(box), *swizzled = PyObject_GetAttr(x, layout);
    if (!swizzled)
        PyErr_Clear(); /* a descriptor of Triton has none */
    int fits = sizes && put_form(key, of, ANY_DEVICE) && put_aside(key, others, sizes) &&
               put_aside(key, others, swizzled ? swizzled : Py_None);
    Py_XDECREF(swizzled);
    Py_XDECREF(sizes);
    Py_DECREF(box);
    Py_DECREF(of);
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
            fits = put_aside(&key, others, x);
    }
    if (fits && (found = PyBytes_FromStringAndSize(key.bytes, key.used))) {
        PyList_SET_ITEM(others, 0, found);
        found = PyList_AsTuple(others);
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a kernel has too many arguments");
    Py_XDECREF(others);
    return found;
}

/* prepare(driver, Tensor, Parameter, JITFunction, constexpr, watchers, is_grad_enabled) */
static PyObject *prepare(PyObject *self, PyObject *given) {
    const char *driver;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(given, "y#OOOOO!O", &driver, &size, &tensor, &parameter, &function,
                          &constant, &PyTuple_Type, &watchers, &is_grad_enabled))
        return NULL;
    Py_INCREF(given); /* and so all of these, for good */
    if (size != sizeof(cuda))
        return PyErr_Format(PyExc_ValueError, "the driver has %zd bytes of addresses", size);
    memcpy(&cuda, driver, sizeof(cuda));
    if (!checked(cuda.version(&driver_version), "its version"))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"look", (PyCFunction)(void (*)(void))look, METH_FASTCALL,
     "look(device, tensors, options): (the key of a call, a key that it shares with calls of other "
     "lengths or None), or None if it is unusual: if a watcher "
     "sees it, a tensor is empty, of another device, of a subclass, or without strides, or if an "
     "option is neither a number, a text, a tuple of these nor None."},
    {"kinds", (PyCFunction)(void (*)(void))kinds, METH_FASTCALL,
     "kinds(arguments, unread, constants): the key of a kernel's compiled form: of a tensor its "
     "type and device, and whether it is aligned to 16 bytes; of an integer whether it is 1, a "
     "multiple of 16, or needs 64 bits; of a descriptor its box. Of an argument whose byte in "
     "`unread` is not 0 only whether it is None; constants as they are."},
    {"prepare", prepare, METH_VARARGS,
     "prepare(driver, Tensor, Parameter, JITFunction, constexpr, watchers, is_grad_enabled): "
     "before all else; with an array of the addresses of the driver's functions."},
    {"sizes", sizes_of, METH_O,
     "sizes(function): the bytes of each of its parameters, as the driver knows them."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "launch", "See launch.c.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_launch(void) {
#define NAME(name)                                                                              \
    if (!(name = PyUnicode_InternFromString(#name)))                                            \
        return NULL;
    NAMES
#undef NAME
    PyObject *made = PyModule_Create(&module);
    if (!made || PyType_Ready(&FormType) < 0 || PyType_Ready(&StepsType) < 0 ||
        PyModule_AddObjectRef(made, "Form", (PyObject *)&FormType) < 0 ||
        PyModule_AddObjectRef(made, "Steps", (PyObject *)&StepsType) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
