"""Environment of text to SQL: a question on a shop's database, a tool to run queries, a tool to submit one."""

import random
import sqlite3
from collections.abc import Iterator
from typing import Any

SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, product TEXT, quantity INTEGER, price REAL);
"""
_FIRST_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon", "Kira", "Leo")
_CITIES = ("Oslo", "Porto", "Lyon", "Graz", "Turin")
_PRODUCTS = ("lamp", "chair", "desk", "shelf", "rug", "clock")
# Most rows that the tool `query` shows.
_SHOWN_ROWS = 20
# Most steps of SQLite's virtual machine for one query, about 0.1 s.
_MOST_STEPS = 10_000_000


class Sqlite:
    """One question about a database in memory. The row's number `shop` is the seed of the database."""

    def reset(self, question: str, sql: str, shop: int = 0, **row: Any) -> str:
        """Create the database; return the user's message with the schema and the question."""
        self._database = sqlite3.connect(":memory:")
        self._database.executescript(SCHEMA)
        _fill_database(self._database, shop)
        self._database.execute("PRAGMA query_only = ON")
        self._is_ordered = "order by" in sql.lower()
        self._right_rows = self._fetch_rows(sql)
        self._submitted_sql: str | None = None
        return f"A SQLite database has these tables:{SCHEMA}\n{question}\nTry queries, then submit the right one."

    def query(self, sql: str) -> str:
        """Run a SELECT statement.

        Args:
            sql: One statement of SQLite.

        Returns:
            The rows, one a line.
        """
        rows = self._fetch_rows(sql)
        lines = ["|".join(map(str, row)) for row in rows[:_SHOWN_ROWS]]
        if len(rows) > _SHOWN_ROWS:
            lines.append(f"... and {len(rows) - _SHOWN_ROWS} more")
        return "\n".join(lines) or "no rows"

    def submit(self, sql: str) -> str:
        """Submit the statement that answers the question.

        Args:
            sql: One SELECT statement of SQLite.

        Returns:
            A confirmation.
        """
        self._submitted_sql = sql
        return "Submitted."

    def get_reward(self) -> float:
        """Return 1 if the submitted statement gives the rows that were asked for, else 0."""
        try:
            rows = self._fetch_rows(self._submitted_sql or "")
        except sqlite3.Error:
            return 0.0
        if self._is_ordered:
            return float(rows == self._right_rows)
        return float(sorted(map(repr, rows)) == sorted(map(repr, self._right_rows)))

    def close(self) -> None:
        """Free the database."""
        self._database.close()

    def _fetch_rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return all rows. Raises sqlite3.Error, also for a statement that takes too long or changes anything."""
        # SQLite calls the handler after that number of steps, and a result of 1 interrupts the statement.
        self._database.set_progress_handler(lambda: 1, _MOST_STEPS)
        return self._database.execute(sql).fetchall()


def _fill_database(database: sqlite3.Connection, shop: int) -> None:
    draw = random.Random(shop)
    names = draw.sample(_FIRST_NAMES, draw.randint(6, len(_FIRST_NAMES)))
    customers = [(name, draw.choice(_CITIES)) for name in names]
    database.executemany("INSERT INTO customers (name, city) VALUES (?, ?)", customers)
    orders = [
        (draw.randint(1, len(names)), draw.choice(_PRODUCTS), draw.randint(1, 9), draw.randint(5, 80) / 2)
        for _ in range(draw.randint(20, 40))
    ]
    database.executemany("INSERT INTO orders (customer_id, product, quantity, price) VALUES (?, ?, ?, ?)", orders)


# (question, SQL of the right answer), both with places for a city, a product or a number.
_QUESTIONS = (
    ("How many customers live in {city}?", "SELECT count(*) FROM customers WHERE city = '{city}'"),
    ("How many orders have more than {number} pieces?", "SELECT count(*) FROM orders WHERE quantity > {number}"),
    (
        "How many pieces of the product {product} were ordered?",
        "SELECT coalesce(sum(quantity), 0) FROM orders WHERE product = '{product}'",
    ),
    (
        "Which customers (name) have ordered the product {product}? List each once.",
        "SELECT DISTINCT name FROM customers JOIN orders ON customers.id = customer_id WHERE product = '{product}'",
    ),
    (
        "What did the orders from {city} bring in all, as quantity times price?",
        "SELECT coalesce(sum(quantity * price), 0) FROM customers JOIN orders ON customers.id = customer_id "
        "WHERE city = '{city}'",
    ),
    (
        "List the {number} products with the most pieces ordered, product and pieces, most first, ties by name.",
        "SELECT product, sum(quantity) AS pieces FROM orders GROUP BY product "
        "ORDER BY pieces DESC, product LIMIT {number}",
    ),
)


def tasks(seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yield random rows without end: with `held_out` of shops whose number is a multiple of 5, else of the others."""
    draw = random.Random(seed)
    while True:
        shop = draw.randrange(100_000)
        is_held_out = shop % 5 == 0
        if is_held_out == held_out:
            question, sql = draw.choice(_QUESTIONS)
            # Both texts get the same values. Each text ignores the values that it does not name.
            values = {"city": draw.choice(_CITIES), "product": draw.choice(_PRODUCTS), "number": draw.randint(2, 6)}
            yield {"question": question.format(**values), "sql": sql.format(**values), "shop": shop}
