"""What is edited: facts, records of edits, and where they come from."""

from malmen.data.readers import read_records, write_records
from malmen.data.records import EditRecord, Fact

__all__ = ["EditRecord", "Fact", "read_records", "write_records"]
