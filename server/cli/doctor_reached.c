// SPDX-License-Identifier: Apache-2.0
/* What follows from attempts to reach the addresses of a worker with large and with small segments. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "server/cli/doctor_tcp.h"

/* Writes "10.0.0.7:4000 (IPv4)". */
static const char *format_address(const struct tl_ip *ip, unsigned port, char ret_text[80])
{
    char text[TL_IP_TEXT_BYTES];
    bool is_v4 = tl_ip_is_v4(ip);
    snprintf(ret_text, 80, "%s%s%s:%u (%s)", is_v4 ? "" : "[", tl_ip_format(ip, text), is_v4 ? "" : "]", port,
             tl_ip_family(ip));
    return ret_text;
}

/* Returns the first address that was reached as far as it goes; NULL: none. */
static const struct tl_doctor_reached *find_working(const struct tl_doctor_reached *reached, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (reached[i].usual.reach == TL_DOCTOR_REACH_ALL) return &reached[i];
    return NULL;
}

/* There is no connection. */
static void explain_no_connection(struct tl_doctor_report *report, const struct tl_doctor_reached *item, unsigned port,
                                  const char *address, const char *working)
{
    char while_working[128] = "";
    int error_number = item->usual.error_number;
    if (working[0] != '\0') snprintf(while_working, sizeof(while_working), ", while %s answers", working);
    if (error_number == ECONNREFUSED) {
        tl_doctor_explain(
            report,
            "%s refuses the connection%s; start the worker, or let it listen at this address (\"listen\": "
            "\"[::]:%u\" takes IPv4 and IPv6)",
            address, while_working, port);
    } else if (error_number == ETIMEDOUT) {
        tl_doctor_explain(
            report,
            "%s does not answer to TCP%s; check that the machine is up, and allow TCP port %u in firewalls "
            "and security groups in between",
            address, while_working, port);
    } else {
        tl_doctor_explain(report, "%s cannot be reached%s: %s; check the address and the network", address,
                          while_working, strerror(error_number));
    }
}

/* Few bytes are answered, many are not. */
static void explain_size(struct tl_doctor_report *report, const struct tl_doctor_reached *item, const char *address)
{
    const char *direction = item->usual.reach == TL_DOCTOR_REACH_LARGE_TO ? "from" : "to";
    if (item->small.reach == TL_DOCTOR_REACH_ALL) {
        tl_doctor_explain(report,
                          "packets with %u bytes of data pass %s %s, those with %u are lost: a hop drops larger ones "
                          "without saying so; lower the MTU of the interface on both machines, let ICMP "
                          "\"fragmentation needed\" pass, or set sysctl net.ipv4.tcp_mtu_probing=1",
                          TL_DOCTOR_SMALL_SEGMENT, direction, address, item->usual.segment_bytes);
    } else {
        tl_doctor_explain(report,
                          "%s answers to few bytes, and not to %u, at any size of packets; a proxy or a limit of the "
                          "network stands in between, or the worker is overloaded: look at its log",
                          address, TL_DOCTOR_LARGE_BYTES);
    }
}

/* The connection stands, and nothing was answered over it with packets of the usual size. */
static void judge_no_answer(struct tl_doctor_report *report, const char *what, const struct tl_doctor_reached *item,
                            const char *address)
{
    if (item->small.reach > TL_DOCTOR_REACH_FOREIGN) {
        tl_doctor_add(report, TL_DOCTOR_FAULT, what, "%s: small packets only", address);
        explain_size(report, item, address);
        return;
    }
    tl_doctor_add(report, TL_DOCTOR_FAULT, what, "%s: connected, no answer", address);
    tl_doctor_explain(report,
                      "%s takes connections and answers to no packet of any size; the process there is stopped, out of "
                      "descriptors or overloaded, or is no worker: look at it there, kill -CONT lets a stopped one go "
                      "on",
                      address);
}

static void judge_no_tls(struct tl_doctor_report *report, const char *what, const struct tl_doctor_reached *item,
                         const char *address)
{
    tl_doctor_add(report, TL_DOCTOR_FAULT, what, "%s: connected, no TLS", address);
    tl_doctor_explain_both(report, item->usual.tls_reason,
                           "give both sides certificates of one authority in security.tls, each with its own name, and "
                           "look at them with \"tensorlane cert show FILE\"");
}

static void judge_foreign(struct tl_doctor_report *report, const char *what, const char *address)
{
    tl_doctor_add(report, TL_DOCTOR_FAULT, what, "%s: no HTTP/2", address);
    tl_doctor_explain(report,
                      "what answers at %s does not speak HTTP/2, or ends the connection at once; stop the other "
                      "program, or give the task another port",
                      address);
}

static void judge(struct tl_doctor_report *report, const char *what, unsigned port,
                  const struct tl_doctor_reached *item, const struct tl_doctor_reached *working)
{
    char address[80], other[80] = "";
    format_address(&item->ip, port, address);
    if (working) format_address(&working->ip, port, other);
    switch (item->usual.reach) {
    case TL_DOCTOR_REACH_NONE:
        tl_doctor_add(report, working ? TL_DOCTOR_NOTE : TL_DOCTOR_FAULT, what, "%s: no connection", address);
        explain_no_connection(report, item, port, address, other);
        break;
    case TL_DOCTOR_REACH_TCP:
        judge_no_answer(report, what, item, address);
        break;
    case TL_DOCTOR_REACH_NO_TLS:
        judge_no_tls(report, what, item, address);
        break;
    case TL_DOCTOR_REACH_FOREIGN:
        judge_foreign(report, what, address);
        break;
    case TL_DOCTOR_REACH_SMALL:
    case TL_DOCTOR_REACH_LARGE_TO:
        tl_doctor_add(report, TL_DOCTOR_FAULT, what, "%s: small packets only", address);
        explain_size(report, item, address);
        break;
    case TL_DOCTOR_REACH_ALL:
        tl_doctor_add(report, TL_DOCTOR_OK, what, "%s: large packets both ways, segments of %u bytes", address,
                      item->usual.segment_bytes);
        break;
    }
}

void tl_doctor_judge_reached(struct tl_doctor_report *report, const char *task, unsigned port,
                             const struct tl_doctor_reached *reached, size_t count)
{
    char what[96];
    const struct tl_doctor_reached *working = find_working(reached, count);
    snprintf(what, sizeof(what), "TCP to %.80s", task);
    for (size_t i = 0; i < count; i++)
        judge(report, what, port, &reached[i], working);
}
