// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORLANE_VERSION_H
#define TENSORLANE_VERSION_H
#include <tensorlane/status.h>
#ifdef __cplusplus
extern "C" {
#endif
#define TL_VERSION "0.1.0"
TL_API const char *tl_version(void);
#ifdef __cplusplus
}
#endif
#endif
