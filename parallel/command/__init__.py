"""What scripts/train.py is.

| file | holds |
|---|---|
| main.py | entry point: options, ranks, threads, one message where something fails |
| options.py | every option, by topic |
| parsing.py | flags, --help, TOML files, config.json |
| rules.py | what is refused that is of no strategy and no mesh |
| factory.py | data, network, loss, optimizer, loaders of given options |
| arguments.py, sizes.py | the command lines of other programs, their kinds of values; bytes as people write them |
| resuming.py, auto.py | a run that is continued; --strategy auto |
| training_run.py | one run, from options to results |
| trained_run.py, predict.py, sample.py | the network that it leaves, and using it |
| doctor.py, findings.py, acceptance.py, trials.py | an acceptance test of ranks, libraries and network |
| commands.py, version.py, report.py, grade.py | the command `ringprop`, its version; pages about runs; points |
| run_directory.py, run_lock.py | its directory, and how to go on from it; only one process trains there |
"""
