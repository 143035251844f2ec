// What is loaded into processes: its entry says what it was given; with fd:N it answers there.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((visibility("default"))) int entry(const char *text) {
  char *copy = strdup(text);
  int n = (int)strlen(copy);
  if (strncmp(copy, "fd:", 3) == 0) {
    int fd = atoi(copy + 3);
    n = write(fd, "hello", 5) == 5 ? 77 : 0;
    close(fd);
  } else if (strcmp(copy, "slow") == 0) {
    sleep(5);
  }
  free(copy);
  return n;
}
