"""Parts of `soak.py`: scenarios, each in a process of its own, and the trainings within them."""
