// SPDX-License-Identifier: Apache-2.0
/* The version that the library was built as. */
#include <tensorlane/version.h>

const char *tl_version(void)
{
    return TL_VERSION;
}
