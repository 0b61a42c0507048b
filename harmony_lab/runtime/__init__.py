"""Running a Program: backends, executor, host store, optimizer."""
