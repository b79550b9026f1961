// SPDX-License-Identifier: Apache-2.0
/* The commands of the program `tensorlane`, each in a file command_NAME.c, and their exit codes. docs/cli.md is the
 * manual. */
#ifndef SERVER_CLI_COMMAND_H
#define SERVER_CLI_COMMAND_H

enum tl_exit {
    TL_EXIT_OK = 0,
    TL_EXIT_FAILED = 1,    /* what was asked for could not be done; one line on stderr says why */
    TL_EXIT_USAGE = 2,     /* the command line is wrong */
    TL_EXIT_NO_DEVICE = 3, /* devices: there is none that can be used */
    TL_EXIT_FAULT = 4,     /* doctor: there is at least one fault */
};

/* The exit codes of `health`, which are those of grpc_health_probe. */
enum tl_health_exit {
    TL_HEALTH_EXIT_OK = 0,
    TL_HEALTH_EXIT_USAGE = 1, /* the command line or the configuration is wrong */
    TL_HEALTH_EXIT_CONNECT = 2,
    TL_HEALTH_EXIT_RPC = 3, /* the call failed or took too long */
    TL_HEALTH_EXIT_UNHEALTHY = 4,
};

/* Each runs a command whose name is argv[0] and returns the exit code of the process. */
int tl_command_serve(int argc, char **argv);
int tl_command_up(int argc, char **argv);
int tl_command_ls(int argc, char **argv);
int tl_command_pull(int argc, char **argv);
int tl_command_push(int argc, char **argv);
int tl_command_rm(int argc, char **argv);
int tl_command_health(int argc, char **argv);
int tl_command_devices(int argc, char **argv);
int tl_command_doctor(int argc, char **argv);
int tl_command_config(int argc, char **argv);
int tl_command_cert(int argc, char **argv);

#endif
