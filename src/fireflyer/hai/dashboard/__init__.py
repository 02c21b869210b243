"""The web dashboard: pages made by the server, one script, one style sheet. See
docs/operate/hai-dashboard.md.

auth_middleware.py       authentication by cookie, and the headers of every response
sessions.py   signed-in browsers, and one-time codes
forms.py      limits of forms, and the check of their origin
refusal_log.py   log of rejected forms and sign-ins
routes.py     signing in and out; page_routes.py the pages; action_routes.py changes;
              live_routes.py streams
page_queries.py      queries of the pages, to the controller and the database
ledger_cache.py      the goodput ledger, kept current
cluster_map.py, timeline.py   geometry
tail.py       the end of a log
event_text.py       events of a task as text
text_filters.py      times, amounts and names as text
pages.py      templates
"""
