// SPDX-License-Identifier: Apache-2.0
/*
 * The program `tensorlane`: finds the command in a table and runs it.
 *
 * Before any command runs, the standard descriptors are made safe (a closed one would be given to the next file that is
 * opened, and what is printed would land in that file) and SIGPIPE is ignored, so that a reader that has gone is an
 * error of the write.
 */
#include <fcntl.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <tensorlane/version.h>

#include "base/check.h"
#include "base/log.h"
#include "base/text.h"
#include "control/control.h"
#include "server/cli/cluster_tls.h"
#include "server/cli/command.h"
#include "server/cli/output.h"

struct command {
    const char *name;
    const char *summary;
    int (*run)(int argc, char **argv);
};

static int run_help(int argc, char **argv);
static int run_version(int argc, char **argv);

static const struct command commands[] = {
    {"serve", "start one worker of a cluster", tl_command_serve},
    {"up", "start all workers of a cluster whose host is this machine", tl_command_up},
    {"ls", "list what a worker publishes", tl_command_ls},
    {"pull", "receive what a worker publishes into a file", tl_command_pull},
    {"push", "publish files on a running worker", tl_command_push},
    {"rm", "end publications of a worker", tl_command_rm},
    {"health", "ask a server, or a whole cluster, how it is", tl_command_health},
    {"devices", "list the RDMA devices of this machine", tl_command_devices},
    {"doctor", "find out what is wrong with this machine", tl_command_doctor},
    {"config", "check and show configurations", tl_command_config},
    {"cert", "make, show and revoke certificates", tl_command_cert},
    {"version", "print the version", run_version},
    {"help", "explain a command", run_help},
};

static const struct command *find_command(const char *name)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(commands); i++)
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    return NULL;
}

static void print_commands(FILE *stream)
{
    fprintf(stream, "usage: tensorlane COMMAND [ARGUMENT...]\n\n");
    fprintf(stream, "Moves named tensors between the workers of a cluster.\n\n");
    for (size_t i = 0; i < TL_ARRAY_COUNT(commands); i++)
        fprintf(stream, "  %-10s%s\n", commands[i].name, commands[i].summary);
    fprintf(stream, "\ntensorlane COMMAND --help explains a command.\n");
}

static int refuse_command(const char *name)
{
    const char *names[TL_ARRAY_COUNT(commands)];
    for (size_t i = 0; i < TL_ARRAY_COUNT(commands); i++)
        names[i] = commands[i].name;
    const char *nearest = tl_text_nearest(name, names, TL_ARRAY_COUNT(names));
    if (nearest) {
        tl_output_error("", "%s: no such command; did you mean %s?", name, nearest);
    } else {
        tl_output_error("", "%s: no such command; tensorlane help lists them", name);
    }
    return TL_EXIT_USAGE;
}

static int run_version(int argc, char **argv)
{
    if (argc > 1) {
        tl_output_error("version", "unexpected argument %s", argv[1]);
        return TL_EXIT_USAGE;
    }
    char core[TL_CONTROL_GRPC_CORE_BYTES];
    printf("tensorlane %s (%s)\n", tl_version(), tl_control_grpc_core(core));
    return tl_output_finish("version", TL_EXIT_OK);
}

static int run_help(int argc, char **argv)
{
    static char help_flag[] = "--help";
    if (argc < 2) {
        print_commands(stdout);
        return tl_output_finish("help", TL_EXIT_OK);
    }
    const struct command *command = find_command(argv[1]);
    if (!command) return refuse_command(argv[1]);
    if (command->run == run_help || command->run == run_version) {
        printf("tensorlane %s: %s\n", command->name, command->summary);
        return tl_output_finish("help", TL_EXIT_OK);
    }
    char *arguments[] = {argv[1], help_flag, NULL};
    return command->run(2, arguments);
}

/* Opens /dev/null for standard descriptors that are closed, so that using them fails. One with FD_CLOEXEC was closed,
 * too, when the program began: gRPC opens a descriptor before main, and leaves it open. */
static void protect_descriptors(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        int flags = fcntl(fd, F_GETFD);
        if (flags >= 0 && (flags & FD_CLOEXEC) == 0) continue;
        if (flags >= 0) close(fd);
        int opened = open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
        if (opened != fd && opened >= 0) close(opened);
    }
}

static void end_at_signal(int signal_number)
{
    _exit(128 + signal_number); /* as a shell says it of a process that the signal has ended */
}

/* The kernel drops the signals of the first process of a container that it has no handlers for. Commands that have
 * their own replace these. */
static void take_signals(void)
{
    struct sigaction action = {.sa_handler = end_at_signal};
    if (getpid() != 1) return;
    sigemptyset(&action.sa_mask);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
}

int main(int argc, char **argv)
{
    protect_descriptors();
    take_signals();
    /* up starts its workers from /proc/self/exe, after which they would be called "exe" in lists of processes. */
    (void)prctl(PR_SET_NAME, "tensorlane");
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file that reaches ulimit -f cannot be written, which is an error like others */
    /* For the widths of characters only: numbers are written in the same way everywhere. */
    setlocale(LC_CTYPE, "C.UTF-8");
    /* Commands print their errors themselves; serve has a log and sets it up. */
    tl_log_configure(TL_LOG_ERROR, TL_LOG_KEY_VALUE);
    tl_control_route_grpc_log(true);
    if (argc < 2) {
        print_commands(stderr);
        return TL_EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) return run_help(1, argv);
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0) return run_version(1, argv);
    const struct command *command = find_command(argv[1]);
    if (!command) return refuse_command(argv[1]);
    int code = command->run(argc - 1, argv + 1);
    tl_cluster_tls_end();
    return code;
}
