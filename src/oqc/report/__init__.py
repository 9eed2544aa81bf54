"""Run records to rows, tables, figures and one page. Reads files, never models, so it runs anywhere."""

from oqc.report.markdown import table
from oqc.report.records import Record, append_record, finished, read_records, rows

__all__ = ["Record", "append_record", "finished", "read_records", "rows", "table"]
