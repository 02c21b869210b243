"""The page's style sheet: s0 to s5 are policies, c0 to c8 the causes of the ledger."""

SHEET = """
:root {
  color-scheme: light dark;
  --ink: #1d2129; --soft: #5b6472; --line: #d8dde5; --page: #fff; --card: #f6f8fa; --on: #fff;
  --s0: #2563eb; --s1: #e1701a; --s2: #12805c; --s3: #a03bc0; --s4: #b3261e; --s5: #5d6b1f;
  --c0: #2f8a54; --c1: #c9302c; --c2: #8e6bbf; --c3: #c66a10; --c4: #a08a10; --c5: #3d74c4;
  --c6: #8b95a3; --c7: #4a4f59; --c8: #b0588a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ee; --soft: #9aa4b2; --line: #343b46; --page: #14171c; --card: #1c2128;
    --s0: #6ea0ff; --s1: #ff9d52; --s2: #4cc79a; --s3: #d48bf0; --s4: #ff8078; --s5: #b9cb6a;
    --c0: #2f8a54; --c1: #d8514c; --c2: #8e6bbf; --c3: #c66a10; --c4: #a08a10; --c5: #3d74c4;
    --c6: #5d6775; --c7: #8c94a1; --c8: #b0588a;
  }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 16px; max-width: 1100px; background: var(--page); color: var(--ink);
  font: 16px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .2em 0 }
h2 { font-size: 1.05rem; margin: 0 0 .4em }
p { margin: .3em 0; color: var(--soft) }
main { display: grid; gap: 14px; margin-top: 14px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)) }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  min-width: 0 }
.wide { grid-column: 1 / -1; overflow-x: auto }
svg { display: block; width: 100%; height: auto }
svg text { fill: var(--soft); font-size: 15px }
svg .label { fill: var(--ink) }
svg .in { fill: var(--on); font-weight: 600 }
.wide svg { max-width: 720px }
@media (min-width: 860px) { svg text { font-size: 12px } }
.grid { stroke: var(--line) }
.line { fill: none; stroke-width: 2 }
table { border-collapse: collapse; width: 100%; font-size: .95rem }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left; white-space: normal; position: sticky; left: -12px;
  background: var(--card) }
td small { display: block; color: var(--soft) }
.key { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 4px 0 8px; font-size: .9rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px }
"""

STYLE = "".join(
    [
        SHEET,
        *(
            f".line.s{n} {{ stroke: var(--s{n}) }}\n"
            f".bar.s{n}, i.s{n} {{ fill: var(--s{n}); background: var(--s{n}) }}\n"
            for n in range(6)
        ),
        *(
            f".part.c{n}, i.c{n} {{ fill: var(--c{n}); background: var(--c{n}) }}\n"
            for n in range(9)
        ),
    ]
)
