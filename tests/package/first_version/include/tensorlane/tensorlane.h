// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORLANE_TENSORLANE_H
#define TENSORLANE_TENSORLANE_H
#include <tensorlane/log.h>
#include <tensorlane/status.h>
#include <tensorlane/tensor.h>
#include <tensorlane/version.h>
#include <tensorlane/worker.h>
#endif
