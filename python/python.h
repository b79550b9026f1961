// SPDX-License-Identifier: Apache-2.0
/* Python's headers, as every file of this folder includes them: first, and within the limits of the stable interface.
 */
#ifndef PYTHON_PYTHON_H
#define PYTHON_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#endif
