"""The command `thinwire`: trainer, jobs, report, records, planner. It imports the core and net."""
