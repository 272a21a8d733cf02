"""Training on one process, and what is the same on many.

| file | holds |
|---|---|
| trainer.py | `Trainer`, the trainer of one process |
| fit.py | `fit`, the one loop that every strategy runs |
| training.py | `Training`, where a run stands, and `Callback` |
| prediction.py | outputs for samples as users have them, in batches |
| state.py | which arrays a trainer's state has, and whether a given one fits |
| loss_scale.py | of mixed precision: the scale, and steps that are skipped |
| batches.py | what `fit` may be given as data |
| callbacks.py, tensorboard.py, event_file.py | progress, metrics, stopping in time; for TensorBoard; its files |
| schedules.py | learning rates by name, and those that listen to training |
| checkpoints.py | files that a crash cannot spoil |
| state_files.py, checkpoint_writer.py | the arrays of a checkpoint's file; who writes it |
| checkpoint_callback.py | when they are written, by whom, and how a run that is asked to end does |
"""
