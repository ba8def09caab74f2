/* The version, in the one place it is written; CMake reads it from here. */
#ifndef RLK_VERSION_H
#define RLK_VERSION_H
#define RLK_VERSION_MAJOR 0
#define RLK_VERSION_MINOR 1
#define RLK_VERSION_PATCH 0
#define RLK_VERSION "0.1.0"
#endif
