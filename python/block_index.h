// SPDX-License-Identifier: Apache-2.0
/*
 * Where the blocks of a cache (tensorlane/kv.py) lie: an index in memory that their owner writes, and that other
 * processes map and read without asking it.
 *
 * A reader copies first, and then looks whether the entry is still the same: each block has a stamp that no other one
 * ever has, and its entry goes before its memory is used again. What the index has no space for is not in it.
 */
#ifndef PYTHON_BLOCK_INDEX_H
#define PYTHON_BLOCK_INDEX_H

#include "python/python.h"

/* _index_add(index, key, begin, size, stamp): puts a block into an index, in place of the one that was put there first
 * among those that could have its entry. index: memory that begins with zeros. stamp: 1 or more. */
PyObject *py_index_add(PyObject *module, PyObject *args);

/* _index_remove(index, key, stamp): from now on no reader finds the block. */
PyObject *py_index_remove(PyObject *module, PyObject *args);

/* _index_read(index, memory, keys, into): copies blocks of these keys from the memory, and returns a list that says of
 * each whether it was there, in the size of its destination. into: a list of destinations; None: nothing is copied.
 * A key that is no text is not there. Gives Python's lock up. */
PyObject *py_index_read(PyObject *module, PyObject *args);

#endif
