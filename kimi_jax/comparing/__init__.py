"""Does a layout compute what one device does: the table of cases (parity), and how a case is run and judged (runs)."""
