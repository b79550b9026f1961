// SPDX-License-Identifier: Apache-2.0
/*
 * The listening socket is found in /proc/net/tcp and tcp6 by its port and address; the process that has it open, among
 * the descriptors of all processes that this user may look into; its state in /proc/PID.
 *
 * Failure modes: a socket of another user has no process that can be seen, and then only its owner is known. What
 * cannot be read is unknown, never an error: this only explains.
 */
#include "server/cli/local_process.h"

#include <ctype.h>
#include <dirent.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/config.h"
#include "server/cli/proc_line.h"
#include "server/cli/socket_table.h"

#define PROGRAM_NAME "tensorlane"
#define LIBRARY_NAME "libtensorlane"

/* Finds the socket that takes connections to one of the addresses; NULL: any socket of the port. */
static bool find_socket(const struct addrinfo *addresses, uint16_t port, struct tl_bound_socket *ret_socket)
{
    struct tl_bound_socket sockets[TL_MAX_BOUND_SOCKETS];
    struct tl_ip ip;
    size_t count;
    (void)tl_socket_table_find("/proc", port, sockets, &count);
    for (size_t i = 0; i < count; i++) {
        bool is_it = addresses == NULL;
        for (const struct addrinfo *item = addresses; item && !is_it; item = item->ai_next)
            is_it = tl_ip_of_sockaddr(item->ai_addr, &ip) && tl_socket_table_takes(&sockets[i].ip, &ip);
        if (!is_it) continue;
        *ret_socket = sockets[i];
        return true;
    }
    return false;
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

/* The library is among the files that the process has mapped. */
static bool has_library(pid_t pid)
{
    char path[64], line[512];
    bool is_found = false;
    snprintf(path, sizeof(path), "/proc/%d/maps", (int)pid);
    FILE *file = fopen(path, "re");
    if (file == NULL) return false;
    while (!is_found && fgets(line, sizeof(line), file) != NULL)
        is_found = strstr(line, LIBRARY_NAME) != NULL;
    fclose(file);
    return is_found;
}

static void describe(struct tl_local_process *process)
{
    char status[64], limits[64], text[128];
    const char *place;
    snprintf(status, sizeof(status), "/proc/%d/status", (int)process->pid);
    snprintf(limits, sizeof(limits), "/proc/%d/limits", (int)process->pid);
    (void)tl_proc_find_line(status, "Name:", process->name, sizeof(process->name));
    if (tl_proc_find_line(status, "State:", text, sizeof(text))) process->state = text[0];
    if (tl_proc_find_line(limits, "Max open files", text, sizeof(text)) &&
        (place = strpbrk(text, "0123456789")) != NULL)
        process->descriptor_limit = strtoull(place, NULL, 10);
    process->is_worker = strcmp(process->name, PROGRAM_NAME) == 0 || has_library(process->pid);
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
    uint16_t port;
    struct tl_bound_socket socket;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    if (tl_address_split(address, host, sizeof(host), &port, NULL) != TL_OK) return false;
    if (getaddrinfo(host, NULL, &hints, &found) != 0) found = NULL;
    bool is_found = find_socket(found, port, &socket);
    if (found != NULL) freeaddrinfo(found);
    if (!is_found) return false;
    struct tl_local_process process = {.user = socket.user};
    find_process(socket.inode, &process);
    *ret_process = process;
    return true;
}
