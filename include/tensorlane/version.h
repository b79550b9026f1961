// SPDX-License-Identifier: Apache-2.0
/* The version of the library: of the headers at compile time, of the linked library at run time. */
#ifndef TENSORLANE_VERSION_H
#define TENSORLANE_VERSION_H

#include <tensorlane/status.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TL_VERSION "0.1.0"

/* The version of the library that is linked, "MAJOR.MINOR.PATCH". Static. */
TL_API const char *tl_version(void);

#ifdef __cplusplus
}
#endif

#endif
