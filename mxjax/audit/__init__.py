"""What a model or a result is: plans before a run, sizes, and checks after one."""
