// SPDX-License-Identifier: Apache-2.0
/*
 * The listening socket is found in /proc/net/tcp and tcp6 by its port and address; the process that has it open, among
 * the descriptors of all processes that this user may look into; its state in /proc/PID.
 *
 * Failure modes: a socket of another user has no process that can be seen, and then only its owner is known. What
 * cannot be read is unknown, never an error: this only explains.
 */
#include "server/cli/local_process.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/config.h"

#define STATE_LISTEN 0x0a
#define PROGRAM_NAME "tensorlane"
#define LIBRARY_NAME "libtensorlane"

/* ----------------------------------------------------------------------------------------------------- sockets -- */

struct listener {
    const struct addrinfo *addresses; /* where a caller arrives; NULL: not known, any socket of the port fits */
    uint16_t port;
    unsigned long inode;
    uint32_t user;
};

static bool is_any(const uint8_t *address, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (address[i] != 0) return false;
    return true;
}

/* Whether a socket that is bound to an address of len bytes takes connections to one of the addresses. */
static bool takes(const struct listener *listener, const uint8_t *bound, size_t len)
{
    if (is_any(bound, len) || listener->addresses == NULL) return true;
    for (const struct addrinfo *item = listener->addresses; item; item = item->ai_next) {
        const void *address = item->ai_family == AF_INET
                                  ? (const void *)&((const struct sockaddr_in *)(const void *)item->ai_addr)->sin_addr
                                  : &((const struct sockaddr_in6 *)(const void *)item->ai_addr)->sin6_addr;
        size_t address_len = item->ai_family == AF_INET ? 4 : 16;
        if (address_len == len && memcmp(address, bound, len) == 0) return true;
        /* An IPv4 address that is bound as IPv6. */
        if (address_len == 4 && len == 16 && memcmp(address, bound + 12, 4) == 0) return true;
    }
    return false;
}

/* The kernel writes addresses as words in the order of this machine. False: no such text. */
static bool read_address(const char *text, uint8_t ret_address[16], size_t *ret_len)
{
    size_t digits = strspn(text, "0123456789ABCDEFabcdef");
    if (digits != 8 && digits != 32) return false;
    for (size_t i = 0; i < digits / 8; i++) {
        char word[9];
        memcpy(word, text + 8 * i, 8);
        word[8] = '\0';
        uint32_t value = (uint32_t)strtoul(word, NULL, 16);
        memcpy(ret_address + 4 * i, &value, sizeof(value));
    }
    *ret_len = digits / 2;
    return true;
}

/* One line of /proc/net/tcp: whether it is a listening socket that fits. */
static bool read_line(struct listener *listener, const char *line)
{
    char bound[40];
    unsigned port, state;
    unsigned long user, inode;
    uint8_t address[16];
    size_t len;
    if (sscanf(line, " %*u: %39[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*x:%*x %*x:%*x %*x %lu %*u %lu", bound, &port,
               &state, &user, &inode) != 5)
        return false;
    if (state != STATE_LISTEN || port != listener->port || !read_address(bound, address, &len)) return false;
    if (!takes(listener, address, len)) return false;
    listener->inode = inode;
    listener->user = (uint32_t)user;
    return true;
}

static bool find_socket(struct listener *listener)
{
    static const char *const tables[] = {"/proc/net/tcp", "/proc/net/tcp6"};
    bool is_found = false;
    for (size_t i = 0; i < 2 && !is_found; i++) {
        char line[512];
        FILE *table = fopen(tables[i], "re");
        if (table == NULL) continue;
        while (!is_found && fgets(line, sizeof(line), table) != NULL)
            is_found = read_line(listener, line);
        fclose(table);
    }
    return is_found;
}

/* --------------------------------------------------------------------------------------------------- processes -- */

/* Counts the open descriptors of a process; *ret_has_socket: the socket is among them. */
static uint64_t look_at_descriptors(pid_t pid, unsigned long inode, bool *ret_has_socket)
{
    char path[64], socket_name[64], target[64];
    uint64_t count = 0;
    *ret_has_socket = false;
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    snprintf(socket_name, sizeof(socket_name), "socket:[%lu]", inode);
    DIR *folder = opendir(path);
    if (folder == NULL) return 0;
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        count++;
        ssize_t len = readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);
        if (len <= 0) continue;
        target[len] = '\0';
        *ret_has_socket = *ret_has_socket || strcmp(target, socket_name) == 0;
    }
    closedir(folder);
    return count;
}

/* Whether a line of a file of the process contains the text; the line is returned. */
static bool find_line(pid_t pid, const char *name, const char *text, char *line, size_t capacity)
{
    char path[64];
    bool is_found = false;
    snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, name);
    FILE *file = fopen(path, "re");
    if (file == NULL) return false;
    while (!is_found && fgets(line, (int)capacity, file) != NULL)
        is_found = strstr(line, text) != NULL;
    fclose(file);
    return is_found;
}

static void describe(struct tl_local_process *process)
{
    char line[512];
    const char *place;
    if (find_line(process->pid, "status", "Name:", line, sizeof(line))) sscanf(line, "Name: %31[^\n]", process->name);
    if (find_line(process->pid, "status", "State:", line, sizeof(line))) sscanf(line, "State: %c", &process->state);
    if (find_line(process->pid, "limits", "Max open files", line, sizeof(line)) &&
        (place = strpbrk(line, "0123456789")) != NULL)
        process->descriptor_limit = strtoull(place, NULL, 10);
    process->is_worker =
        strcmp(process->name, PROGRAM_NAME) == 0 || find_line(process->pid, "maps", LIBRARY_NAME, line, sizeof(line));
}

static void find_process(unsigned long inode, struct tl_local_process *process)
{
    DIR *folder = opendir("/proc");
    if (folder == NULL) return;
    for (const struct dirent *entry; process->pid == 0 && (entry = readdir(folder)) != NULL;) {
        bool has_socket;
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        pid_t pid = (pid_t)atoi(entry->d_name);
        uint64_t count = look_at_descriptors(pid, inode, &has_socket);
        if (!has_socket) continue;
        process->pid = pid;
        process->descriptors = count;
        describe(process);
    }
    closedir(folder);
}

bool tl_local_process_listening(const char *address, struct tl_local_process *ret_process)
{
    char host[256];
    struct listener listener = {0};
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    struct tl_local_process process = {0};
    if (tl_address_split(address, host, sizeof(host), &listener.port, NULL) != TL_OK) return false;
    if (getaddrinfo(host, NULL, &hints, &found) != 0) found = NULL;
    listener.addresses = found;
    bool is_found = find_socket(&listener);
    if (found != NULL) freeaddrinfo(found);
    if (!is_found) return false;
    process.user = listener.user;
    find_process(listener.inode, &process);
    *ret_process = process;
    return true;
}
