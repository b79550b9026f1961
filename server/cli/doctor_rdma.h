// SPDX-License-Identifier: Apache-2.0
/* What `tensorlane doctor` finds about RDMA cards. */
#ifndef SERVER_CLI_DOCTOR_RDMA_H
#define SERVER_CLI_DOCTOR_RDMA_H

#include "server/cli/devices.h"
#include "server/cli/doctor.h"

/* The ports of all cards: state, MTU, memory windows and NUMA node, and the table of partition keys. The report is that
 * of the first task of this machine that wants a card, or of none. */
void tl_doctor_check_ports(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                           const struct tl_doctor_needs *needs, const struct tl_devices_report *devices);

/* Whether a GID is the address of the task, and which card it would take. */
void tl_doctor_check_choice(struct tl_doctor_report *report, const struct tl_doctor_needs *needs,
                            const struct tl_devices_report *devices);

#endif
