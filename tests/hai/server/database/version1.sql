BEGIN TRANSACTION;
CREATE TABLE attempt (
	task INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	nodes TEXT NOT NULL, 
	launched BOOLEAN NOT NULL, 
	outcome TEXT, 
	PRIMARY KEY (task, number), 
	FOREIGN KEY(task) REFERENCES task (id)
);
INSERT INTO "attempt" VALUES(1,1,'["n0"]',1,NULL);
CREATE TABLE event (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	task INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	detail TEXT NOT NULL, 
	monotonic_ns INTEGER NOT NULL, 
	wall FLOAT NOT NULL, 
	FOREIGN KEY(task) REFERENCES task (id)
);
INSERT INTO "event" VALUES(1,1,0,'submitted','{}',1000,1795348801.0);
INSERT INTO "event" VALUES(2,1,0,'queued','{}',1000,1795348801.0);
INSERT INTO "event" VALUES(3,2,0,'submitted','{}',2000,1795348802.0);
INSERT INTO "event" VALUES(4,2,0,'queued','{}',2000,1795348802.0);
INSERT INTO "event" VALUES(5,1,1,'starting','{"nodes":["n0"]}',3000,1795348803.0);
INSERT INTO "event" VALUES(6,1,1,'rank_started','{"rank":0,"node":"n0","pid":4711}',4000,1795348804.0);
INSERT INTO "event" VALUES(7,1,1,'running','{}',4000,1795348804.0);
CREATE TABLE schema_version (
	product TEXT NOT NULL, 
	version INTEGER NOT NULL
);
INSERT INTO "schema_version" VALUES('fireflyer hai',1);
CREATE TABLE task (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	spec TEXT NOT NULL, 
	secret TEXT NOT NULL, 
	state TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	restarts INTEGER NOT NULL, 
	stopping BOOLEAN NOT NULL, 
	warm BOOLEAN NOT NULL, 
	created FLOAT NOT NULL
);
INSERT INTO "task" VALUES(1,'{"script":"/x.py","args":["--lr","0.1"],"name":"","cwd":"/","env":{},"nodes":1,"ranks_per_node":1,"start":"fork","max_restarts":3,"elastic":false,"grace_s":30.0}','5ecret','running','',1,0,0,1,1795348801.0);
INSERT INTO "task" VALUES(2,'{"script":"/x.py","args":["--lr","0.1"],"name":"","cwd":"/","env":{},"nodes":1,"ranks_per_node":1,"start":"fork","max_restarts":3,"elastic":false,"grace_s":30.0}','5ecret','queued','',0,0,0,0,1795348802.0);
CREATE INDEX ix_task_state ON task (state);
CREATE INDEX event_by_task ON event (task, attempt, seq);
CREATE TRIGGER event_no_update BEFORE update ON event
BEGIN SELECT RAISE(ABORT, 'the history is append-only'); END;
CREATE TRIGGER event_no_delete BEFORE delete ON event
BEGIN SELECT RAISE(ABORT, 'the history is append-only'); END;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('task',2);
INSERT INTO "sqlite_sequence" VALUES('event',7);
COMMIT;
