"""What scripts/train.py is.

| file | holds |
|---|---|
| main.py | entry point: options, ranks, threads, one message where something fails |
| options.py | every option, by topic |
| parsing.py | flags, --help, TOML files, config.json |
| rules.py | every refusal |
| factory.py | data, network, loss, optimizer, loaders of given options |
| axes.py, sizes.py | what --mesh and --pipeline say; bytes as people write them |
| registry.py, auto.py | strategies by name; --strategy auto |
| training_run.py | one run, from options to results |
| trained_run.py, predict_images.py, sample.py | the network that it leaves, and using it |
| report.py | a page about some runs |
| commands.py, version.py | the command `ringprop`, which finds the scripts; which ringprop this is |
| run_directory.py, run_lock.py | its directory, and how to go on from it; only one process trains there |
"""
