// SPDX-License-Identifier: Apache-2.0
#include "python/part.h"

#include <stdlib.h>

#include "python/worker_object.h"

/* Reads one of the sequences of a box into an array. Returns its length, -1 with an exception. */
static int read_numbers(PyObject *box, const char *name, uint64_t ret_numbers[TL_MAX_RANK])
{
    PyObject *numbers = PyObject_GetAttrString(box, name);
    int rank = numbers != NULL ? py_shape_of(numbers, ret_numbers) : -1;
    Py_XDECREF(numbers);
    return rank;
}

static bool read_box(struct py_part *part, PyObject *box)
{
    PyObject *into_start = PyObject_GetAttrString(box, "into_start");
    bool has_into_start = into_start != NULL && into_start != Py_None;
    Py_XDECREF(into_start);
    if (into_start == NULL) return false;
    int rank = read_numbers(box, "size", part->size);
    int start_rank = rank >= 0 ? read_numbers(box, "start", part->start) : -1;
    if (start_rank < 0) return false;
    int into_rank = has_into_start ? read_numbers(box, "into_start", part->into_start) : rank;
    if (into_rank < 0) return false;
    if (start_rank != rank || into_rank != rank) {
        PyErr_SetString(PyExc_ValueError, "all sequences of a Box have as many entries as the tensor has dimensions");
        return false;
    }
    part->part.rank = (unsigned)rank;
    part->part.start = part->start;
    part->part.size = part->size;
    if (has_into_start) part->part.destination_start = part->into_start;
    return true;
}

static bool read_range(PyObject *object, struct tl_byte_range *ret_range)
{
    PyObject *pair = PySequence_Tuple(object);
    bool is_read = pair != NULL && PyArg_ParseTuple(pair, "O&O&;a part is a Box or a list of (offset, length) in bytes",
                                                    py_convert_uint64, &ret_range->offset_bytes, py_convert_uint64,
                                                    &ret_range->len_bytes);
    Py_XDECREF(pair);
    return is_read;
}

static bool read_ranges(struct py_part *part, PyObject *object)
{
    PyObject *ranges = PySequence_Tuple(object);
    Py_ssize_t count = ranges != NULL ? PyTuple_Size(ranges) : -1;
    if (count == 0) PyErr_SetString(PyExc_ValueError, "a part has at least one range of bytes");
    if (count > 0) part->ranges = calloc((size_t)count, sizeof(*part->ranges));
    if (count > 0 && part->ranges == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++)
        (void)!read_range(PyTuple_GetItem(ranges, i), &part->ranges[i]);
    Py_XDECREF(ranges);
    part->part.ranges = part->ranges;
    part->part.range_count = (size_t)count;
    return !PyErr_Occurred();
}

bool py_part_init(struct py_part *part, PyObject *object)
{
    part->part = (struct tl_part){.size_bytes = sizeof(part->part)};
    part->ranges = NULL;
    return PyObject_HasAttrString(object, "into_start") ? read_box(part, object) : read_ranges(part, object);
}

void py_part_fini(struct py_part *part)
{
    free(part->ranges);
}
