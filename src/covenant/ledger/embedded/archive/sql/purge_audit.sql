DELETE FROM audit WHERE idx <= :through
