"""Is a schedule right? All ranks in one process, and what each operation must end with."""
