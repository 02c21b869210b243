"""FFRecord: record files with random batch reads."""
