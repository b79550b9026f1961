// SPDX-License-Identifier: Apache-2.0
/*
 * gRPC's messages are chains such as "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:4000:
 * Failed to connect to remote host: Connection refused". The end of the chain is the reason; what stands before it is
 * taken away, and a reason that is known becomes a sentence. The texts are those of gRPC 1.51 and of the current core,
 * which writes "connect: Connection refused (111)" for the same, and "Stream removed (Socket closed)" where 1.51 writes
 * what is in brackets. Another text is passed on as it is, behind the address.
 */
#include "control/grpc_text.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

/* A reason, or its beginning, and what the sentence says behind the address. */
struct sentence {
    const char *reason;
    const char *text;
    const char *remedy; /* behind the rest of the reason, which the sentence repeats; NULL: it does not */
};

/* Before the connection stood. */
static const struct sentence connecting[] = {
    {"Failed to connect to remote host: Connection refused", " refused the connection; is the worker started?", NULL},
    {"connect: Connection refused", " refused the connection; is the worker started?", NULL},
    {"Failed to connect to remote host: Connection timed out",
     " did not take the connection in time; is the machine up, and is there a firewall in between?", NULL},
    {"connect: Connection timed out",
     " did not take the connection in time; is the machine up, and is there a firewall in between?", NULL},
    {"connect() timed out",
     " did not take the connection in time; is the machine up, and is there a firewall in between?", NULL},
    {"Failed to connect to remote host: ", " cannot be reached: ", "; check the address and the network"},
    {"connect: ", " cannot be reached: ", "; check the address and the network"},
    {"Trying to connect an http1.x server",
     " accepts connections but does not speak gRPC (HTTP/2 without TLS); is it the port of another program?", NULL},
    {"Socket closed", " accepts connections and closes them at once; is it the port of another program?", NULL},
    {"connection attempt timed out before receiving SETTINGS frame",
     " accepts connections but has not answered in time; is the process stopped or overloaded, or is it the port of "
     "another program?",
     NULL},
};

/* Afterwards. */
static const struct sentence connected[] = {
    {"Socket closed", " closed the connection", NULL},
    {"Connection reset by peer", " reset the connection", NULL},
    {"Broken pipe", " reset the connection", NULL},
    {"Received RST_STREAM with error code 11",
     " refused the call; does it get too many at once, or is its memory for messages used up?", NULL},
    {"GOAWAY received",
     " ends its connections; is it stopping, is its memory for messages used up, or does it want TLS "
     "(security.tls of a configuration, --tls-ca-cert beside --address)?",
     NULL},
    {"keepalive watchdog timeout", " has not answered for too long; is the machine up, and the process running?", NULL},
    {"keepalive timeout", " has not answered for too long; is the machine up, and the process running?", NULL},
    {"ping timeout", " has not answered for too long; is the machine up, and the process running?", NULL},
    {"DNS resolution failed for ", " cannot be resolved: ", "; check the name, and the name service of this machine"},
};

/* Whether gRPC writes an address here. */
static bool has_scheme(const char *text)
{
    return strncmp(text, "ipv4:", 5) == 0 || strncmp(text, "ipv6:", 5) == 0;
}

/* gRPC writes "ipv4:10.0.0.1:4000" and, because the brackets of IPv6 may not stand in a URI, "ipv6:%5B::1%5D:4000". */
const char *tl_grpc_text_address(const char *text, char *buffer, size_t capacity)
{
    size_t used = 0;
    buffer[0] = '\0';
    while (*text != '\0' && !has_scheme(text))
        text++;
    if (*text == '\0') return buffer;
    text += strlen("ipv4:");
    const char *end = text + strcspn(text, " \"',;()");
    if (end > text && end[-1] == ':') end--;
    while (text < end && used + 1 < capacity) {
        bool is_bracket = strncmp(text, "%5B", 3) == 0 || strncmp(text, "%5D", 3) == 0;
        buffer[used++] = !is_bracket ? *text : text[2] == 'B' ? '[' : ']';
        text += is_bracket ? 3 : 1;
    }
    buffer[text < end ? 0 : used] = '\0';
    return buffer;
}

/* Cuts the brackets that have been opened before the text. */
static void cut_brackets(char *text)
{
    for (size_t depth = 1; *text != '\0'; text++) {
        if (*text == '(') depth++;
        if (*text == ')' && --depth == 0) *text = '\0';
        if (*text == '\0') return;
    }
}

static bool unwrap_once(char *text)
{
    static const char *const wrappers[] = {"Stream removed (", "RST_STREAM (", "Transport closed (",
                                           "Endpoint read failed ("};
    for (size_t i = 0; i < TL_ARRAY_COUNT(wrappers); i++) {
        size_t len = strlen(wrappers[i]);
        if (strncmp(text, wrappers[i], len) != 0) continue;
        memmove(text, text + len, strlen(text + len) + 1);
        cut_brackets(text);
        return true;
    }
    return false;
}

void tl_grpc_text_unwrap(char *text)
{
    while (unwrap_once(text)) {
    }
}

/* Cuts the number of an error of the system: "connect: Connection refused (111)". */
static void cut_error_number(char *text)
{
    char *number = strrchr(text, '(');
    if (number == NULL || number - text < 2 || number[-1] != ' ') return;
    size_t len = strspn(number + 1, "0123456789");
    if (len > 0 && strcmp(number + 1 + len, ")") == 0) number[-1] = '\0';
}

/* Without what stands before the reason: "UNKNOWN: ", "ipv4:10.0.0.1:4000: ". */
static char *skip_to_reason(char *text)
{
    static const char capitals[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ_";
    size_t len = strspn(text, capitals);
    if (len > 0 && strncmp(text + len, ": ", 2) == 0) text += len + 2;
    char *end = strstr(text, ": ");
    if (has_scheme(text) && end != NULL) text = end + 2;
    static const char dialling[] = "Failed to connect to remote host: connect: ";
    if (strncmp(text, dialling, strlen(dialling)) == 0) text = strstr(text, "connect: ");
    bool is_of_message = strncmp(text, "recvmsg:", 8) == 0 || strncmp(text, "sendmsg:", 8) == 0;
    if (is_of_message || strncmp(text, "connect: ", 9) == 0) cut_error_number(text);
    if (is_of_message) text += 8 + (text[8] == ' ');
    return text;
}

static bool explain_as(struct tl_error *error, const char *reason, const char *address,
                       const struct sentence *sentences, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        size_t len = strlen(sentences[i].reason);
        if (strncmp(reason, sentences[i].reason, len) != 0) continue;
        char rest[512];
        const char *remedy = sentences[i].remedy;
        snprintf(rest, sizeof(rest), "%.250s%s", remedy != NULL ? reason + len : "", remedy != NULL ? remedy : "");
        tl_error_set(error, error->code, "%s%s%s", address, sentences[i].text, rest);
        return true;
    }
    return false;
}

void tl_grpc_text_explain(struct tl_error *error, const char *address)
{
    static const char before[] = "last error: ";
    char *last = strstr(error->message, before);
    const char *reason = skip_to_reason(last != NULL ? last + strlen(before) : error->message);
    bool is_explained = last != NULL ? explain_as(error, reason, address, connecting, TL_ARRAY_COUNT(connecting))
                                     : explain_as(error, reason, address, connected, TL_ARRAY_COUNT(connected));
    if (is_explained) return;
    if (last == NULL) {
        tl_error_prefix(error, "%s: ", address);
        return;
    }
    char copy[TL_ERROR_MESSAGE_BYTES];
    snprintf(copy, sizeof(copy), "%s", reason);
    tl_error_set(error, error->code, "%.256s cannot be connected to: %.700s", address, copy);
}
