"""Run records to rows, tables, figures and one page. Reads files, never models, so it runs anywhere."""

from oqc.report.records import Record, append_record, finished, read_records, rows
from oqc.report.tables import table

__all__ = ["Record", "append_record", "finished", "read_records", "rows", "table"]
