// SPDX-License-Identifier: Apache-2.0
#include "python/block_index.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

/* Entries at which a block can be. */
enum { WAY_COUNT = 4 };

struct entry {
    _Atomic uint64_t stamp; /* the block has it; 0: there is none, or it is just being written */
    _Atomic uint64_t begin, size, hash_low, hash_high;
};

/* A block that is looked for. */
struct sought {
    Py_buffer into;
    XXH128_hash_t hash;
    bool has_hash;
    bool is_found;
};

/* Reads a key. Returns false where it is no text. */
static bool hash_key(PyObject *key, XXH128_hash_t *ret_hash)
{
    Py_ssize_t len = 0;
    const char *text = key != NULL && PyUnicode_Check(key) ? PyUnicode_AsUTF8AndSize(key, &len) : NULL;
    PyErr_Clear();
    if (text == NULL) return false;
    *ret_hash = XXH3_128bits(text, (size_t)len);
    return true;
}

/* Returns the first of the entries at which a block can be; NULL: the memory is no index. */
static struct entry *bucket_of(const Py_buffer *index, XXH128_hash_t hash)
{
    uint64_t count = (uint64_t)index->len / (WAY_COUNT * sizeof(struct entry));
    bool is_aligned = (uintptr_t)index->buf % _Alignof(struct entry) == 0;
    return count > 0 && is_aligned ? (struct entry *)index->buf + hash.low64 % count * WAY_COUNT : NULL;
}

static uint64_t get(const _Atomic uint64_t *number)
{
    return atomic_load_explicit(number, memory_order_relaxed);
}

static void set(_Atomic uint64_t *number, uint64_t value)
{
    atomic_store_explicit(number, value, memory_order_relaxed);
}

/* ------------------------------------------------------------------------------------------------------ owner -- */

/* Nothing that is written afterwards, past the caches included, can be seen by a reader that still sees the block. */
static void clear(struct entry *entry)
{
    set(&entry->stamp, 0);
    atomic_thread_fence(memory_order_seq_cst);
}

static void add(const Py_buffer *index, XXH128_hash_t hash, uint64_t begin, uint64_t size, uint64_t stamp)
{
    struct entry *bucket = bucket_of(index, hash), *chosen = bucket;
    if (bucket == NULL) return;
    for (int way = 1; way < WAY_COUNT; way++)
        if (get(&bucket[way].stamp) < get(&chosen->stamp)) chosen = &bucket[way];
    clear(chosen);
    set(&chosen->begin, begin);
    set(&chosen->size, size);
    set(&chosen->hash_low, hash.low64);
    set(&chosen->hash_high, hash.high64);
    atomic_store_explicit(&chosen->stamp, stamp, memory_order_release);
}

PyObject *py_index_add(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer index;
    PyObject *key;
    unsigned long long begin, size, stamp;
    XXH128_hash_t hash;
    if (!PyArg_ParseTuple(args, "w*OKKK:_index_add", &index, &key, &begin, &size, &stamp)) return NULL;
    if (hash_key(key, &hash)) add(&index, hash, begin, size, stamp);
    PyBuffer_Release(&index);
    Py_RETURN_NONE;
}

PyObject *py_index_remove(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer index;
    PyObject *key;
    unsigned long long stamp;
    XXH128_hash_t hash;
    if (!PyArg_ParseTuple(args, "w*OK:_index_remove", &index, &key, &stamp)) return NULL;
    struct entry *bucket = hash_key(key, &hash) ? bucket_of(&index, hash) : NULL;
    for (int way = 0; bucket != NULL && way < WAY_COUNT; way++)
        if (get(&bucket[way].stamp) == stamp) clear(&bucket[way]);
    PyBuffer_Release(&index);
    Py_RETURN_NONE;
}

/* ----------------------------------------------------------------------------------------------------- reader -- */

/* Copies a block if the entry is its own before and after. What the owner wrote is not trusted to lie within. */
static bool read_entry(const struct entry *entry, const Py_buffer *memory, const struct sought *sought)
{
    uint64_t stamp = atomic_load_explicit(&entry->stamp, memory_order_acquire);
    if (stamp == 0 || get(&entry->hash_low) != sought->hash.low64 || get(&entry->hash_high) != sought->hash.high64)
        return false;
    uint64_t begin = get(&entry->begin), size = get(&entry->size), memory_size = (uint64_t)memory->len;
    if (sought->into.obj != NULL) {
        if (size != (uint64_t)sought->into.len || begin > memory_size || size > memory_size - begin) return false;
        if (size > 0) memcpy(sought->into.buf, (const char *)memory->buf + begin, size);
    }
    atomic_thread_fence(memory_order_acquire);
    return get(&entry->stamp) == stamp;
}

static void read_all(const Py_buffer *index, const Py_buffer *memory, struct sought *sought, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        struct entry *bucket = sought[i].has_hash ? bucket_of(index, sought[i].hash) : NULL;
        for (int way = 0; bucket != NULL && !sought[i].is_found && way < WAY_COUNT; way++)
            sought[i].is_found = read_entry(&bucket[way], memory, &sought[i]);
    }
}

/* Reads what is looked for, and where it goes. Returns false with an exception. */
static bool read_keys(PyObject *keys, PyObject *into, struct sought *sought, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        sought[i].has_hash = hash_key(PyList_GetItem(keys, i), &sought[i].hash);
        PyObject *one = into != NULL ? PyList_GetItem(into, i) : NULL;
        if (into == NULL) continue;
        if (one == NULL || PyObject_GetBuffer(one, &sought[i].into, PyBUF_WRITABLE) != 0) return false;
    }
    return true;
}

static PyObject *read_lists(const Py_buffer *index, const Py_buffer *memory, PyObject *keys, PyObject *into)
{
    Py_ssize_t count = PyList_Size(keys);
    if (into != NULL && PyList_Size(into) != count)
        return PyErr_Format(PyExc_ValueError, "there is not one destination for each key");
    PyObject *found = NULL;
    struct sought *sought = calloc((size_t)count + 1, sizeof(*sought));
    if (sought == NULL) return PyErr_NoMemory();
    if (read_keys(keys, into, sought, count)) {
        Py_BEGIN_ALLOW_THREADS;
        read_all(index, memory, sought, count);
        Py_END_ALLOW_THREADS;
        found = PyList_New(count);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (found != NULL) PyList_SetItem(found, i, PyBool_FromLong(sought[i].is_found));
        if (sought[i].into.obj != NULL) PyBuffer_Release(&sought[i].into);
    }
    free(sought);
    return found;
}

PyObject *py_index_read(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer index, memory;
    PyObject *keys, *into;
    if (!PyArg_ParseTuple(args, "y*y*O!O:_index_read", &index, &memory, &PyList_Type, &keys, &into)) return NULL;
    PyObject *found = NULL;
    if (into != Py_None && !PyList_Check(into))
        PyErr_SetString(PyExc_TypeError, "into is a list, or None");
    else
        found = read_lists(&index, &memory, keys, into != Py_None ? into : NULL);
    PyBuffer_Release(&index);
    PyBuffer_Release(&memory);
    return found;
}
