"""Parts that several tools use: trainings, contenders, processes that measure, tables."""
