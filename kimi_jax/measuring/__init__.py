"""Times beside what the machine allows: steps (bench), the same by transformers (peer), loading and saving (disk)."""
