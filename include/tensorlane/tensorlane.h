// SPDX-License-Identifier: Apache-2.0
/*
 * The whole public API.
 *
 * A program works with every library of the same SONAME (libtensorlane.so.1) that is at least as new as the headers it
 * was compiled with, and with an older one as long as it uses nothing that the older one lacks:
 *
 * - Functions and values of enums are only added. A program must expect values that it does not know, such as a new
 *   path of a completion.
 * - A struct whose first field is size_bytes may get new fields at its end. The caller sets size_bytes to the sizeof of
 *   its headers. The library reads at most the fields that it knows, and takes fields that the caller's struct lacks as
 *   zero. A program that is newer than the library may leave the new fields zero; a field that the library does not
 *   know and that is not zero is refused with TL_UNIMPLEMENTED, because to ignore it would do something else than what
 *   was asked. In structs that the library fills, fields that it does not know become zero.
 * - struct tl_completion, struct tl_error and the structs without size_bytes keep their size.
 */
#ifndef TENSORLANE_TENSORLANE_H
#define TENSORLANE_TENSORLANE_H

#include <tensorlane/log.h>
#include <tensorlane/path.h>
#include <tensorlane/status.h>
#include <tensorlane/tensor.h>
#include <tensorlane/version.h>
#include <tensorlane/worker.h>

#endif
