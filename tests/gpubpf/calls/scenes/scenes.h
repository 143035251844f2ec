/* What takes a while, for a reason. Gives 0, or -1 where it cannot be done here. */
int scene_work(const char *what, const char *argument); /* a call that is watched */
int scene_plainly(const char *what, const char *argument); /* the same, which nobody watches */
int scene_launch(void);
